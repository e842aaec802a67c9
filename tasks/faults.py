"""A fault of the person who started the flow, or of a service it needs: one line, and no stack trace."""


class Fault(ValueError):
    """What is wrong, with the value, and what would be right."""


class Stopped(RuntimeError):
    """The flow is being cancelled, or the work is somebody else's by now."""
