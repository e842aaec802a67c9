"""A fault of the person who started a command or a flow, or of the host or a service: one line, no stack trace."""


class Fault(ValueError):
    """What is wrong, with the value, and what would be right."""
