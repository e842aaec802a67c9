"""Time that is left of a training, from the steps behind its first one, which compiles, allocates and connects."""

from contract.amounts import clock


class Pace:
    """Pace of a training. Validation and saves between its steps count as well."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None

    def left(self, step: int, last: int, now: float) -> str:
        """The words on the time left once this step has ended; empty behind the first step, when nobody knows."""
        if self.first is None:
            self.first = step, now
        done = step - self.first[0]
        return f"  left {clock((last - step) * (now - self.first[1]) / done)}" if done else ""
