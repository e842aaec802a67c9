"""Whole weights from the trainer to all engines, in buckets, and the same buckets once more with other numbers.

The first two transfers take every tensor from Megatron-Bridge and have vLLM load it. Behind them each side may know
where the numbers of a bucket lie (trainer/reinforcement/transfer/repeated/): then nothing is left but to fill buckets
and to send them, at the speed of what lies between the two.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

from conf.rules.reinforcement import cut
from conf.schema.run import Run
from contract.faults import Fault
from trainer.reinforcement.engines import settings
from trainer.reinforcement.engines.engine import Engine
from trainer.reinforcement.engines.group import Group
from trainer.reinforcement.transfer import shared_memory, wire
from trainer.reinforcement.transfer.export import Export
from trainer.reinforcement.transfer.repeated import filling
from trainer.reinforcement.transfer.repeated.buckets import Buckets
from trainer.reinforcement.transfer.repeated.filling import Filling
from trainer.startup import device
from trainer.startup.console import say

AFTERWARDS = 2.0  # seconds in which a process that takes no weights may say why
Tensors = Iterator[tuple[str, torch.Tensor]]


class Sender:
    """The trainer's end of what lies between it and the engines: a pipe to each, or memory that all see."""

    def __init__(self, run: Run, group: Group, transport: str):
        self.run, self.group, self.transport = run, group, transport
        self.buckets: list[list[wire.Meta]] = []  # of the last whole transfer
        self.repeated: Buckets | None = None  # the same, once it has been repeated
        self.can_repeat = self.told = False  # whether every engine can
        self.fillings: list[Filling] | None = None  # what may fill the buckets without Bridge
        self.proven = False  # whether it has filled them with what Bridge exports

    def send(self, tensors: Tensors, version: int, export: Export | None) -> int:
        """Give every engine the weights of a version. Returns how many bytes went over to each."""
        for engine in [*self.group.engines]:
            if not engine.joined:
                self.group.attempt(engine, partial(self._join, engine))
        sent = (self._repeat if self.can_repeat else self._send_whole)(tensors, version, export)
        self.proven = bool(self.fillings)
        if export and self.unlike:
            export.give_up(f"{self.unlike} would be another")
        if self.transport == "ipc":
            shared_memory.collect()
        return sent

    def _prepare(self, export: Export | None) -> None:
        """Have what fills the buckets, as far as it is known."""
        self.unlike = ""
        known = export is not None and bool(self.buckets) and export.is_known()
        if not known:
            self.fillings, self.proven = None, False
        elif self.fillings is None and export:
            self.fillings = export.fillings(self.buckets)

    def _send_whole(self, tensors: Tensors, version: int, export: Export | None) -> int:
        self._prepare(export)
        self.group.each("begin")
        before, self.buckets, self.repeated = self.buckets, [], None
        allocate, size = self._memory()
        reading, handles = list[Engine](), dict[int, Any]()
        for bucket in wire.buckets(tensors, allocate, size):
            self._wait_for(reading)
            self._compare(len(self.buckets), bucket.metas, bucket.bytes)
            for engine in [*self.group.engines]:
                reading += [engine for _ in self.group.attempt(engine, partial(self._send, engine, bucket, handles))]
            self.buckets.append(bucket.metas)
        self._wait_for(reading)
        reasons = self.group.each("finish", version=version).values()
        self.can_repeat = not any(reasons) and bool(before)
        if before and not self.can_repeat and not self.told and device.has_gpu():  # on a CPU it is always so
            self.told = True
            say(f"weights: vLLM loads them for every step, as it would for the first: {next(filter(None, reasons))}")
        return sum(one.bytes for one in chain.from_iterable(self.buckets))

    def _compare(self, number: int, metas: list[wire.Meta], memory: torch.Tensor) -> None:
        """Hold what fills a bucket without Bridge against what Bridge has made."""
        if self.fillings is None or self.proven:
            return
        mine = self.fillings[number] if number < len(self.fillings) else None
        if mine is None or [one.name for one in mine.metas] != [one.name for one in metas]:
            self.unlike = metas[0].name
        else:
            found = torch.empty_like(memory)
            mine.fill(found)
            self.unlike = filling.first_unlike(metas, found, memory) or ""
        if self.unlike:
            self.fillings = None

    def _wait_for(self, reading: list[Engine]) -> None:
        """Wait until vLLM is done with the bucket before, whose memory is filled next."""
        for engine in reading:
            self.group.attempt(engine, partial(engine.answer, "bucket"))
        reading.clear()

    def _send(self, engine: Engine, bucket: wire.Bucket, handles: dict[int, Any]) -> None:
        shared = self._shared(bucket.memory, handles) if self.transport == "ipc" else None
        engine.ask("bucket", {"metas": bucket.metas, "used": bucket.used, "shared": shared})
        if engine.pipe is not None:
            self._over(engine, "bucket", partial(engine.pipe.send, bucket.bytes))

    def _repeat(self, tensors: Tensors, version: int, export: Export | None) -> int:
        """Send all buckets once more."""
        if self.transport != "ipc":
            for engine in [*self.group.engines]:  # which get ready while this side does
                self.group.attempt(engine, partial(engine.ask, "repeat", {"version": version}))
        self._prepare(export)
        allocate, _ = self._memory()
        self.repeated = self.repeated or Buckets(self.buckets, torch.device("cuda" if device.has_gpu() else "cpu"))
        self.repeated.begin()
        rooms = self.repeated.rooms(allocate)
        if self.transport == "ipc":
            self._repeat_shared(tensors, rooms, self.repeated)
            self.group.each("end_repeated", sums=self.repeated.digests().tolist(), version=version)
        else:
            self._repeat_over_pipes(tensors, rooms, self.repeated)
        if not self.proven and (more := next(tensors, None)):
            raise Fault(f"transfer of weights: {more[0]} came, and not before")
        return self.repeated.bytes

    def _repeat_over_pipes(self, tensors: Tensors, rooms: list[torch.Tensor], repeated: Buckets) -> None:
        """While a bucket goes over, the next is filled; the digests of all go over behind the last."""
        going = list[list[tuple[Engine, Any]]]()
        for number, (room, used) in enumerate(zip(rooms, repeated.used, strict=True)):
            memory = room[:used]
            for engine, work in going[number - 2] if number > 1 else ():
                self._attempt_over(engine, work.wait)
            self._fill(number, memory, tensors)
            repeated.add(number, memory)
            going.append([])
            for engine in [*self.group.engines]:
                assert engine.pipe
                begin = partial(engine.pipe.broadcast, memory.to(engine.pipe.device))
                going[-1] += [(engine, work) for work in self._attempt_over(engine, begin)]
        found = repeated.digests()
        for engine in [*self.group.engines]:
            assert engine.pipe
            self._attempt_over(engine, partial(engine.pipe.send, found))
        for engine in [*self.group.engines]:
            self.group.attempt(engine, partial(engine.answer, "repeat"))

    def _repeat_shared(self, tensors: Tensors, rooms: list[torch.Tensor], repeated: Buckets) -> None:
        reading, handles = list[Engine](), dict[int, Any]()
        for number, (room, used) in enumerate(zip(rooms, repeated.used, strict=True)):
            memory = room[:used]
            self._fill(number, memory, tensors)
            repeated.add(number, memory)
            if memory.is_cuda:  # the other process does not wait for this one's stream
                torch.cuda.current_stream().synchronize()
            self._wait_for(reading)
            asked = {"number": number, "shared": self._shared(room, handles)}
            for engine in [*self.group.engines]:
                reading += [engine for _ in self.group.attempt(engine, partial(engine.ask, "repeat_bucket", asked))]
        self._wait_for(reading)

    def _fill(self, number: int, memory: torch.Tensor, tensors: Tensors) -> None:
        """Fill a bucket's memory."""
        if self.fillings and self.proven:
            self.fillings[number].fill(memory)
            return
        metas = self.buckets[number]
        for one, place in wire.placed(metas):
            name, tensor = next(tensors, ("nothing", None))
            if name != one.name or tensor is None:
                raise Fault(f"transfer of weights: {name} came in the place of {one.name}")
            wire.part(memory, one, place).copy_(tensor.detach())
        self._compare(number, metas, memory)

    def _shared(self, memory: torch.Tensor, handles: dict[int, Any]) -> Any:
        """What opens the memory elsewhere. A second handle of the same memory would keep it from being freed."""
        place = memory.data_ptr()
        handles[place] = handles.get(place) or shared_memory.shared(memory)
        return handles[place]

    def _attempt_over(self, engine: Engine, call: Callable[[], Any]) -> list[Any]:
        return self.group.attempt(engine, partial(self._over, engine, "repeat", call))

    def _over(self, engine: Engine, name: str, call: Callable[[], Any]) -> Any:
        """Do what sends something to the engine. Where that fails, the engine says why."""
        try:
            return call()
        except RuntimeError:
            if engine.patience and not engine.connection.poll(AFTERWARDS):
                raise engine.lost(name) from None
            engine.answer(name)  # says why it is gone
            raise

    def _join(self, engine: Engine) -> None:
        if self.transport == "ipc":
            settings.require_reach(self.run)
            engine.call("join", host=None, port=None)
        else:
            port = wire.free_port()
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
