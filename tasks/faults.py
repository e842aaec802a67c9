"""How a task ends that cannot do its work: by a fault, which is one line, or because it was told to."""

from conf.faults import Fault

__all__ = ["Fault", "Stopped"]


class Stopped(RuntimeError):
    """The flow is being cancelled, or the work is somebody else's by now."""
