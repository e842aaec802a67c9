"""How a tracking service declines: for now, or for good."""


class Away(Exception):
    """The service does not answer, or answers that it cannot now."""


class Refused(Exception):
    """The service will never take this."""
