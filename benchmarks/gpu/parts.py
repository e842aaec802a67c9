"""Cut archives into parts that each fit one transfer, with a list by which unpack.sh knows them again."""

import hashlib
import shutil
from pathlib import Path

LISTED = "parts.txt"  # as sha256sum writes it
BLOCK = 1 << 20


def cut(archives: list[Path], folder: Path, size: int) -> list[list[str]]:
    """Cut archives into FOLDER/NAME.1of2 and so on; names of the parts that fit a transfer of `size` bytes together."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sizes: dict[str, int] = {}
    lines = []
    for archive in archives:
        whole = archive.stat().st_size
        count = -(-whole // size)
        with archive.open("rb") as f:
            for number in range(1, count + 1):
                part = folder / f"{archive.name}.{number}of{count}"
                sizes[part.name] = left = min(size, whole - size * (number - 1))
                digest = hashlib.sha256()
                with part.open("wb") as to:
                    while left:
                        block = f.read(min(BLOCK, left))
                        digest.update(block)
                        to.write(block)
                        left -= len(block)
                lines.append(f"{digest.hexdigest()}  {part.name}\n")
    (folder / LISTED).write_text("".join(lines))
    return together(sizes, size)


def together(sizes: dict[str, int], size: int) -> list[list[str]]:
    """Share parts out to as few transfers as the largest part first makes them."""
    transfers: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        room = (each for each in transfers if sum(sizes[other] for other in each) + sizes[name] <= size)
        fits = next(room, None)
        if fits is None:
            transfers.append([name])
        else:
            fits.append(name)
    return transfers
