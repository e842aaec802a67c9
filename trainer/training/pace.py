"""Time that a training still needs, from the pace of its steps except the first, which compiles and connects."""

from contract.amounts import clock


class Pace:
    """Pace of a training. Validations and saves between steps count as well."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None

    def left(self, step: int, last: int, now: float) -> str:
        """Text with the time left after this step; empty after the first, when no pace is known."""
        if self.first is None:
            self.first = step, now
        steps = step - self.first[0]
        return f"  left {clock((last - step) * (now - self.first[1]) / steps)}" if steps else ""
