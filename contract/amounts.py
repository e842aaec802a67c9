"""Numbers of bytes, as people read them."""

UNITS = ("B", "KB", "MB", "GB", "TB")


def size(count: float) -> str:
    """Format a number of bytes in the unit that fits: 716.0 GB, 1.2 MB, 12 B."""
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def unlike(one: float, other: float) -> tuple[str, str]:
    """Format two sizes so that they look different. If both are rounded to the same text, they are shown in bytes."""
    if one != other and size(one) == size(other):
        return f"{one:,.0f} B", f"{other:,.0f} B"
    return size(one), size(other)
