"""Errors of a tracking service: temporary and permanent."""

from tasks.tracking.address import clean


class Away(Exception):
    """The service does not answer, or is unavailable for now."""


class Refused(Exception):
    """The service will never accept this event."""


def line_of(error: Exception) -> str:
    """Return the error as one short line without passwords: a database's error contains a complete statement."""
    text = clean(" ".join(str(error).split()))
    return text if len(text) < 300 else text[:300] + "..."
