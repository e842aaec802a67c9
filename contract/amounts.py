"""Readable formats of numbers of bytes, spans of time and prices."""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

UNITS = ("B", "KB", "MB", "GB", "TB")


def size(count: float) -> str:
    """Format a number of bytes with a suitable unit: 716.0 GB, 1.2 MB, 12 B."""
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def clock(seconds: float) -> str:
    """Format a span of time in hours, minutes and seconds: 0:00:07, 27:30:00."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def dollars(price: float) -> str:
    """Format a price in USD: without cents from 10 on, and with one digit below a cent: 148, 7.45, 0.004."""
    if not 0 < price < 10:
        return f"{price:,.0f}"
    return f"{price:.2f}" if price >= 0.01 else f"{price:.1g}"


def unlike(one: float, other: float) -> tuple[str, str]:
    """Format two sizes so that they look different. If both are rounded to the same text, they are shown in bytes."""
    if one != other and size(one) == size(other):
        return f"{one:,.0f} B", f"{other:,.0f} B"
    return size(one), size(other)
