"""Consecutive items in groups of limited size."""

from collections.abc import Iterable, Iterator


def up_to[Item](most: int, sizes: Iterable[tuple[Item, int]]) -> Iterator[list[Item]]:
    """Yield the items in groups whose sizes add up to at most `most`; a larger item is a group alone."""
    group: list[Item] = []
    total = 0
    for item, size in sizes:
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group
