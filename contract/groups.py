"""Groups of items that are processed together."""

from collections.abc import Iterable, Iterator


def grouped[Item](sizes: Iterable[tuple[Item, int]], most: int) -> Iterator[list[Item]]:
    """Cut items into groups, in order, of at most this total size. A larger item is a group alone."""
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
