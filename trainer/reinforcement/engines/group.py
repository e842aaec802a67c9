"""Engines that are asked the same: one that ends is left out from then on, as long as there is another."""

from collections.abc import Callable
from functools import partial
from typing import Any

from trainer.reinforcement.engines.engine import Engine, Lost
from trainer.startup.console import say


class Group:
    """Engines of vLLM."""

    def __init__(self, started: int, far: bool):
        self.engines: list[Engine] = []
        self.started, self.far, self.closing = started, far, False

    def each(self, name: str, **arguments: Any) -> dict[Engine, Any]:
        """Ask every engine the same. Returns what each says."""
        for engine in [*self.engines]:
            self.attempt(engine, partial(engine.ask, name, arguments))
        return {
            engine: found for engine in [*self.engines] for found in self.attempt(engine, partial(engine.answer, name))
        }

    def attempt(self, engine: Engine, call: Callable[[], Any]) -> list[Any]:
        """Result of the call in a list; an empty one where the engine is lost and others are left.

        An engine that was left out before is asked nothing: what was begun with it may come up once more.
        """
        if engine not in self.engines:
            return []
        try:
            return [call()]
        except Lost as lost:
            if len(self.engines) == 1 and self.far and not self.closing:
                raise RuntimeError(f"{lost}; no host of vLLM's own is left") from None  # the next attempt has others
            if len(self.engines) == 1 or self.closing:
                raise
            self.engines.remove(engine)
            engine.close(patience=0)
            say(f"{lost}; {engine.name} is left out, and {len(self.engines)} of {self.started} engines go on")
            return []
