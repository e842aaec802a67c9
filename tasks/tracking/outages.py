"""Refusals of a tracking service: for now, or for good."""


class Away(Exception):
    """The service does not answer, or answers that it cannot now."""


class Refused(Exception):
    """The service will never take this event."""
