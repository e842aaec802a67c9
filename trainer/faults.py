"""A fault of the person who started the command: one line on stderr, exit code 2, no stack trace."""


class Fault(ValueError):
    """What is wrong, with the value, and what would be right."""
