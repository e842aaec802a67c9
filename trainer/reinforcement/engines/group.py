"""A group of engines that get the same calls. An engine that ends is removed, unless it is the last."""

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
        """Call every engine. Returns the result of each."""
        for engine in [*self.engines]:
            self.attempt(engine, partial(engine.ask, name, arguments))
        return {
            engine: result
            for engine in [*self.engines]
            for result in self.attempt(engine, partial(engine.answer, name))
        }

    def attempt(self, engine: Engine, call: Callable[[], Any]) -> list[Any]:
        """Result of the call in a list; an empty list if the engine is lost and others remain.

        An engine that was removed before is not called: a caller may still hold it from an earlier call.
        """
        if engine not in self.engines:
            return []
        try:
            return [call()]
        except Lost as lost:
            if len(self.engines) == 1 and self.far and not self.closing:
                raise RuntimeError(f"{lost}; no host of vLLM's is left") from None  # the next attempt has others
            if len(self.engines) == 1 or self.closing:
                raise
            self.engines.remove(engine)
            engine.close(patience=0)
            say(f"{lost}; {engine.name} is removed, and {len(self.engines)} of {self.started} engines continue")
            return []
