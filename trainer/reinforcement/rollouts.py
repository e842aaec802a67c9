"""The trainer's side of vLLM: one or several engines with the same weights, which share the prompts.

Rank 0 controls them, on its own host or on other hosts (reinforce.hosts). An engine that ends is removed, and its
prompts go to the others: the run continues while at least one engine runs. Their output is in <paths.logs>/rollout.log,
rollout-1.log and so on.
"""

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from conf.rules.reinforcement import engines, in_turn
from conf.schema.run import Run
from trainer.reinforcement.engines import settings
from trainer.reinforcement.engines.engine import Engine, Group, LocalEngine
from trainer.reinforcement.engines.meeting import Meeting
from trainer.reinforcement.engines.sender import Sender
from trainer.reinforcement.transfer import in_memory, wire
from trainer.reinforcement.transfer.export import Export
from trainer.serving import unmerged
from trainer.startup import device
from trainer.startup.console import say

WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of its memory on a GPU
# A prompt as vLLM has read it, its answers, and the version of the weights.
Answered = tuple[list[int], list[tuple], int]


class Rollouts(Group):
    """Engines of vLLM, which answer with the weights that were sent to them."""

    def __init__(self, run: Run):
        settings.require_room(run)
        super().__init__(engines(run), far=bool(run.reinforce.hosts))
        self.run, self.transport = run, settings.transport(run)
        self.sender = Sender(run, self, self.transport)
        self.sleeps, self.asleep = device.has_gpu() and in_turn(run), set[str]()
        self.meeting = Meeting(run) if run.reinforce.hosts else None
        if self.meeting:
            return
        of_engine = settings.of(run)
        for number in range(self.started):
            log = Path(run.paths.logs) / (f"rollout-{number}.log" if number else "rollout.log")
            self.engines.append(LocalEngine(f"engine {number}", of_engine, log, settings.environment(run, number)))
        self._watch()

    def ready(self) -> None:
        """Wait until vLLM has loaded the released model.

        A run does not start without all engines on the trainer's host. An engine on another host that fails is removed.
        """
        if self.meeting:
            self.engines = [*self.meeting.engines()]
            say(f"rollout: connected: {', '.join(engine.name for engine in self.engines)}")
            self._watch()
            self.attempt_each(Engine.ready)
        for engine in self.engines:
            engine.ready()

    def _watch(self) -> None:
        if self.started > 1 or self.run.reinforce.staleness:  # the next call of an engine may be much later
            for engine in self.engines:
                engine.watch(lambda ended: say(f"rollout: {ended.name}: {ended.end()}"))

    def answer(
        self, prompts: Sequence[list[int]], seeds: Sequence[int] | None, max_tokens: int | list[int], **sampling: Any
    ) -> list[Answered]:
        """Return the answers to prompts. Every engine gets a share; if an engine ends, the others get its share."""
        answered: dict[int, Answered] = {}
        waiting, busy = [*range(len(prompts))], dict[Engine, list[int]]()

        def ask(engine: Engine, numbers: list[int]) -> None:
            limits = [max_tokens[number] for number in numbers] if isinstance(max_tokens, list) else max_tokens
            arguments = {"prompts": [prompts[number] for number in numbers], "max_tokens": limits}
            arguments["seeds"] = [seeds[number] for number in numbers] if seeds else None
            engine.ask("answer", arguments | sampling)
            busy[engine] = numbers

        while waiting or busy:
            idle = [engine for engine in self.engines if engine not in busy]
            for engine, numbers in zip(idle, _shares(waiting, len(idle)), strict=True):
                if numbers:
                    self.attempt(engine, partial(ask, engine, numbers))
            waiting = [number for number in waiting if not any(number in numbers for numbers in busy.values())]
            ready = wait([engine.connection for engine in busy])  # have answered or ended
            for engine in [engine for engine in busy if engine.connection in ready]:
                numbers = busy.pop(engine)
                for answers in self.attempt(engine, partial(engine.answer, "answer")):
                    results = [(prompt, outputs, engine.version) for prompt, outputs in answers]
                    answered |= dict(zip(numbers, results, strict=True))
                waiting += [number for number in numbers if number not in answered]
        return [answered[number] for number in range(len(prompts))]

    def update(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int, export: Export | None = None) -> int:
        """Send all weights of a version to vLLM. Returns the number of bytes sent to each engine. Call begin() next.

        `export` is the source of the tensors; it may know how to fill buckets without exporting them.
        """
        self.wake(WEIGHTS)
        if self.transport == "files":
            return self._by_file(tensors, version)
        return self.sender.send(tensors, version, export)

    def begin(self) -> None:
        """Prepare vLLM to answer with the new weights: wake it, and drop its caches of earlier weights."""
        self.wake()
        self.each("forget")

    def adapt(self, folder: str, version: int) -> int:
        """Send vLLM the adapter of a version, as a folder in PEFT's format. Returns the number of bytes."""
        self.wake()
        tensors = load_file(Path(folder) / unmerged.WEIGHTS)
        metas = [wire.meta(name, tensor) for name, tensor in tensors.items()]
        self.each("adapt", folder=folder, metas=metas, version=version)
        return sum(meta.bytes for meta in metas)

    def close(self) -> None:
        self.closing = True
        if self.meeting:
            self.meeting.close()
        for engine in [*self.engines]:
            engine.close()

    def sleep(self) -> None:
        """Make vLLM free the GPU for the trainer. vLLM drops weights that will be sent again anyway."""
        if self.sleeps and not self.asleep:
            self.each("sleep", level=1 if self.transport == "adapter" else 2)
            self.asleep = {WEIGHTS, CACHE}

    def wake(self, *parts: str) -> None:
        """Make vLLM allocate its memory again, or only these parts of it. Before, the trainer frees its unused memory.

        The cache of keys and values is woken after the weights, when the memory for their transfer is free again.
        """
        if waking := self.asleep & set(parts or self.asleep):
            torch.cuda.empty_cache()
            self.each("wake_up", parts=sorted(waking))
            self.asleep -= waking

    def _by_file(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        model = Path(self.run.paths.model)
        with in_memory.folder() as folder:
            for file in model.glob("*.json"):
                if not file.name.endswith(".index.json"):
                    shutil.copy(file, folder)
            weights = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors}
            metas = [wire.meta(name, tensor) for name, tensor in weights.items()]
            save_file(weights, Path(folder) / "model.safetensors")
            self.each("load", folder=folder, metas=metas, version=version)
        return sum(meta.bytes for meta in metas)


def _shares(numbers: Sequence[int], count: int) -> list[list[int]]:
    """The numbers in consecutive parts of nearly equal size."""
    bounds = [len(numbers) * part // count for part in range(count + 1)] if count else []
    return [[*numbers[start:end]] for start, end in pairwise(bounds)]
