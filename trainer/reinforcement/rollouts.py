"""The trainer's side of vLLM: one or several engines, which have the same weights and share the prompts.

Rank 0 has them, beside itself or on hosts of their own (reinforce.hosts). An engine that ends is left out from then on,
and what it was asked is asked of the others: the run goes on as long as there is one. What they print is in
<paths.logs>/rollout.log, rollout-1.log and so on.
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
from trainer.reinforcement.engines.engine import Engine, LocalEngine
from trainer.reinforcement.engines.group import Group
from trainer.reinforcement.engines.meeting import Meeting
from trainer.reinforcement.engines.sender import Sender
from trainer.reinforcement.transfer import in_memory, wire
from trainer.reinforcement.transfer.export import Export
from trainer.serving import unmerged
from trainer.startup import device
from trainer.startup.console import say

WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of what it holds on a GPU
# A prompt as vLLM has read it, its answers, and the version of the weights that gave them.
Answered = tuple[list[int], list[tuple], int]


class Rollouts(Group):
    """Engines of vLLM, which answer by the weights that they were sent."""

    def __init__(self, run: Run):
        settings.require_room_beside(run)
        super().__init__(engines(run), far=bool(run.reinforce.hosts))
        self.run, self.transport = run, settings.transport(run)
        self.sender = Sender(run, self, self.transport)
        self.sleeps, self.asleep = device.has_gpu() and in_turn(run), set[str]()
        self.meeting = Meeting(run) if run.reinforce.hosts else None
        if self.meeting:
            return
        given = settings.of(run)
        for number in range(self.started):
            log = Path(run.paths.logs) / (f"rollout-{number}.log" if number else "rollout.log")
            self.engines.append(LocalEngine(f"engine {number}", given, log, settings.environment(run, number)))
        self._watch()

    def ready(self) -> None:
        """Wait until vLLM has loaded the released model.

        Without all engines beside the trainer a run does not begin. A host of vLLM's own that fails is left out.
        """
        if self.meeting:
            self.engines = [*self.meeting.engines()]
            say(f"rollout: {', '.join(engine.name for engine in self.engines)} are there")
            self._watch()
            for engine in [*self.engines]:
                self.attempt(engine, engine.ready)
        for engine in self.engines:
            engine.ready()

    def _watch(self) -> None:
        if self.started > 1 or self.run.reinforce.staleness:  # what reads of an engine may be long in coming
            for engine in self.engines:
                engine.watch(_say_ended)

    def answer(
        self, prompts: Sequence[list[int]], seeds: Sequence[int] | None, max_tokens: int | list[int], **sampling: Any
    ) -> list[Answered]:
        """Have prompts answered. Every engine has a share of them, and those of one that ends go to the others."""
        found: dict[int, Answered] = {}
        left, busy = [*range(len(prompts))], dict[Engine, list[int]]()

        def ask(engine: Engine, numbers: list[int]) -> None:
            limits = [max_tokens[one] for one in numbers] if isinstance(max_tokens, list) else max_tokens
            given = {"prompts": [prompts[one] for one in numbers], "max_tokens": limits}
            given["seeds"] = [seeds[one] for one in numbers] if seeds else None
            engine.ask("answer", given | sampling)
            busy[engine] = numbers

        while left or busy:
            idle = [engine for engine in self.engines if engine not in busy]
            for engine, numbers in zip(idle, _shares(left, len(idle)), strict=True):
                if numbers:
                    self.attempt(engine, partial(ask, engine, numbers))
            left = [one for one in left if not any(one in numbers for numbers in busy.values())]
            for engine in _answering(busy):
                numbers = busy.pop(engine)
                for answers in self.attempt(engine, partial(engine.answer, "answer")):
                    said = [(read, told, engine.version) for read, told in answers]
                    found |= dict(zip(numbers, said, strict=True))
                left += [one for one in numbers if one not in found]
        return [found[number] for number in range(len(prompts))]

    def update(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int, export: Export | None = None) -> int:
        """Give vLLM all weights of a version. Returns how many bytes went over to each engine. begin() comes next.

        `export` is what the tensors are of, where they may be made without it.
        """
        self.wake(WEIGHTS)
        if self.transport == "files":
            return self._by_file(tensors, version)
        return self.sender.send(tensors, version, export)

    def begin(self) -> None:
        """Have vLLM ready to answer by the weights that it was given, and by nothing it has kept of earlier ones."""
        self.wake()
        self.each("forget")

    def adapt(self, folder: str, version: int) -> int:
        """Give vLLM the adapter of a version, from a folder in PEFT's format. Returns how many bytes went over."""
        self.wake()
        found = load_file(Path(folder) / unmerged.WEIGHTS)
        metas = [wire.meta(name, tensor) for name, tensor in found.items()]
        self.each("adapt", folder=folder, metas=metas, version=version)
        return sum(one.bytes for one in metas)

    def close(self) -> None:
        self.closing = True
        if self.meeting:
            self.meeting.close()
        for engine in [*self.engines]:
            engine.close()

    def sleep(self) -> None:
        """Have vLLM leave the GPU to the trainer. It forgets what will be sent again anyway."""
        if self.sleeps and not self.asleep:
            self.each("sleep", level=1 if self.transport == "adapter" else 2)
            self.asleep = {WEIGHTS, CACHE}

    def wake(self, *parts: str) -> None:
        """Have vLLM take its memory again, all of it or these parts. The trainer leaves what it holds and does not use.

        The cache of keys and values comes behind the weights, when what they were sent through is free again.
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
            found = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors}
            metas = [wire.meta(name, tensor) for name, tensor in found.items()]
            save_file(found, Path(folder) / "model.safetensors")
            self.each("load", folder=folder, metas=metas, version=version)
        return sum(one.bytes for one in metas)


def _shares(numbers: Sequence[int], among: int) -> list[list[int]]:
    """Parts of the numbers, one behind another and as even as can be."""
    bounds = [len(numbers) * part // among for part in range(among + 1)] if among else []
    return [[*numbers[start:end]] for start, end in pairwise(bounds)]


def _answering(busy: dict[Engine, list[int]]) -> list[Engine]:
    """The engines that have answered, or ended, once there is one."""
    ready = wait([engine.connection for engine in busy])
    return [engine for engine in busy if engine.connection in ready]


def _say_ended(engine: Engine) -> None:
    say(f"rollout: {engine.name}: {engine.end()}")
