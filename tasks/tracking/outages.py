"""Refusals of a tracking service: for now, or for good."""

from tasks.tracking.address import clean


class Away(Exception):
    """The service does not answer, or answers that it cannot now."""


class Refused(Exception):
    """The service will never take this event."""


def line_of(error: Exception) -> str:
    """The error as one line of bounded length without passwords. A database's error holds a whole statement."""
    text = clean(" ".join(str(error).split()))
    return text if len(text) < 300 else text[:300] + "..."
