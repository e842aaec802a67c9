"""The trainer's side of vLLM: one or several engines, which have the same weights and share the prompts.

Rank 0 has them, beside itself or on hosts of their own (reinforce.hosts). An engine that ends is left out from then on,
and what it was asked is asked of the others: the run goes on as long as there is one. What they print is in
<paths.logs>/rollout.log, rollout-1.log and so on.
"""

import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from conf.rules.reinforcement import cut, engines, in_turn
from conf.schema.run import Run
from trainer.reinforcement.engines import settings
from trainer.reinforcement.engines.engine import Engine, LocalEngine, Lost
from trainer.reinforcement.engines.meeting import Meeting
from trainer.reinforcement.transfer import in_memory, shared_memory, wire
from trainer.serving import unmerged
from trainer.startup import device
from trainer.startup.console import say

AFTERWARDS = 2.0  # seconds in which a process that takes no weights may say why
WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of what it holds on a GPU
# A prompt as vLLM has read it, its answers, and the version of the weights that gave them.
Answered = tuple[list[int], list[tuple], int]


class Rollouts:
    """Engines of vLLM."""

    def __init__(self, run: Run):
        settings.require_room_beside(run)
        self.run, self.transport = run, settings.transport(run)
        self.sleeps, self.asleep = device.has_gpu() and in_turn(run), set[str]()
        self.started, self.closing = engines(run), False
        self.engines: list[Engine] = []
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
                self._try(engine, engine.ready)
        for engine in self.engines:
            engine.ready()

    def _watch(self) -> None:
        if self.started > 1 or self.run.reinforce.staleness:  # what reads of an engine may be long in coming
            for engine in self.engines:
                engine.watch(_say_ended)

    def each(self, name: str, **arguments: Any) -> dict[Engine, Any]:
        """Ask every engine the same. Returns what each says."""
        for engine in [*self.engines]:
            self._try(engine, partial(engine.ask, name, arguments))
        return {
            engine: found for engine in [*self.engines] for found in self._try(engine, partial(engine.answer, name))
        }

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
                    self._try(engine, partial(ask, engine, numbers))
            left = [one for one in left if not any(one in numbers for numbers in busy.values())]
            for engine in _answering(busy):
                numbers = busy.pop(engine)
                for answers in self._try(engine, partial(engine.answer, "answer")):
                    said = [(read, told, engine.version) for read, told in answers]
                    found |= dict(zip(numbers, said, strict=True))
                left += [one for one in numbers if one not in found]
        return [found[number] for number in range(len(prompts))]

    def update(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        """Give vLLM all weights of a version. Returns how many bytes went over to each engine. begin() comes next."""
        self.wake(WEIGHTS)
        return self._by_file(tensors, version) if self.transport == "files" else self._by(tensors, version)

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

    def _try(self, engine: Engine, call: Callable[[], Any]) -> list[Any]:
        """Result of the call in a list; an empty one where the engine is lost and others are left."""
        try:
            return [call()]
        except Lost as lost:
            if len(self.engines) == 1 and self.meeting and not self.closing:
                raise RuntimeError(f"{lost}; no host of vLLM's own is left") from None  # the next attempt has others
            if len(self.engines) == 1 or self.closing:
                raise
            self.engines.remove(engine)
            engine.close(patience=0)
            say(f"{lost}; {engine.name} is left out, and {len(self.engines)} of {self.started} engines go on")
            return []

    def _by(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        for engine in [*self.engines]:
            if not engine.joined:
                self._try(engine, partial(self._join, engine))
        self.each("begin")
        sent = self._send_all(tensors)
        self.each("finish", version=version)
        if self.transport == "ipc":
            shared_memory.collect()
        return sent

    def _send_all(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
        sent, reading = 0, list[Engine]()
        allocate, size = self._memory()
        handles: dict[int, Any] = {}  # by address: a second one of the same memory would keep it from being freed

        def wait_for_all() -> None:
            """Wait until vLLM is done with the bucket before, whose memory is filled next."""
            for engine in reading:
                self._try(engine, partial(engine.answer, "bucket"))
            reading.clear()

        for bucket in wire.buckets(tensors, allocate, size):
            wait_for_all()
            for engine in [*self.engines]:
                reading += [engine for _ in self._try(engine, partial(self._send, engine, bucket, handles))]
            sent += sum(one.bytes for one in bucket.metas)
        wait_for_all()
        return sent

    def _join(self, engine: Engine) -> None:
        if self.transport == "ipc":
            settings.require_reach(self.run)
            engine.call("join", host=None, port=None)
        else:
            port = _free_port()
            engine.ask("join", {"host": engine.address, "port": port})
            where = torch.device("cuda" if self.transport == "nccl" and device.has_gpu() else "cpu")
            try:
                given = (engine.address, port, 0, where, engine.is_gone, engine.patience)
                engine.pipe = wire.Pipe(*given, workers=cut(self.run))
            except RuntimeError:
                if engine.patience:
                    raise engine.lost("join") from None
                raise
            engine.answer("join")
        engine.joined = True

    def _memory(self) -> tuple[Callable[[int], torch.Tensor], int]:
        """What allocates memory for buckets, and how many bytes a bucket has."""
        if self.transport == "ipc":
            return shared_memory.allocate, wire.BUCKET_OF_GPU if device.has_gpu() else wire.BUCKET
        where, size = ("cuda", wire.BUCKET_OF_GPU) if device.has_gpu() else ("cpu", wire.BUCKET)
        if self.transport == "gloo":
            size = wire.BUCKET
        return (lambda size: torch.empty(size, dtype=torch.uint8, device=where)), size

    def _send(self, engine: Engine, bucket: wire.Bucket, handles: dict[int, Any]) -> None:
        shared, place = None, bucket.memory.data_ptr()
        if self.transport == "ipc":
            shared = handles[place] = handles.get(place) or shared_memory.shared(bucket.memory)
        engine.ask("bucket", {"metas": bucket.metas, "used": bucket.used, "shared": shared})
        if engine.pipe is None:
            return
        try:
            engine.pipe.send(bucket.bytes)
        except RuntimeError:
            if engine.patience and not engine.connection.poll(AFTERWARDS):
                raise engine.lost("bucket") from None
            engine.answer("bucket")  # says why it is gone
            raise

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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
