"""Send all weights from the trainer to all engines in buckets, and later the same buckets with new values.

In the first two transfers, Megatron-Bridge exports every tensor, and vLLM loads it. After that, each side may know the
place of every value in the buckets (trainer/reinforcement/transfer/repeated/). Further transfers then only fill and
send buckets, at the speed of the link.
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
from trainer.reinforcement.engines.engine import Engine, Group
from trainer.reinforcement.transfer import shared_memory, wire
from trainer.reinforcement.transfer.export import Export
from trainer.reinforcement.transfer.repeated import filling
from trainer.reinforcement.transfer.repeated.buckets import Buckets
from trainer.reinforcement.transfer.repeated.filling import Filling
from trainer.serving import hosts
from trainer.startup import device
from trainer.startup.console import say

AFTERWARDS = 2.0  # seconds for a process that does not receive weights to report the reason
Tensors = Iterator[tuple[str, torch.Tensor]]


class Sender:
    """The trainer's side of the transfer of weights: over a pipe to each engine, or by memory that all share."""

    def __init__(self, run: Run, group: Group, transport: str):
        self.run, self.group, self.transport = run, group, transport
        self.device = torch.device("cuda" if device.has_gpu() else "cpu")
        self.buckets: list[list[wire.Meta]] = []  # of the last whole transfer
        self.repeated: Buckets | None = None  # the same buckets, after the first repetition
        self.can_repeat = self.reported = False  # whether every engine can repeat; whether the reason was logged
        self.fillings: list[Filling] | None = None  # these may fill the buckets without Bridge
        self.proven = False  # whether the fillings have produced the same bytes as Bridge
        self.handles: dict[int, Any] = {}  # of shared memory in this transfer, by address

    def send(self, tensors: Tensors, version: int, export: Export | None) -> int:
        """Send the weights of a version to every engine. Returns the number of bytes sent to each."""
        self.group.attempt_each(self._join)
        self.handles = {}
        sent = (self._repeat if self.can_repeat else self._send_whole)(tensors, version, export)
        self.proven = bool(self.fillings)
        if export and self.unlike:
            export.give_up(f"{self.unlike} would differ")
        if self.transport == "ipc":
            shared_memory.collect()
        return sent

    def _prepare(self, export: Export | None) -> None:
        """Prepare the fillings, if the export already knows them."""
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
        reading = list[Engine]()
        for bucket in wire.buckets(tensors, allocate, size):
            self.group.answers(reading, "bucket")  # the memory of the previous bucket is filled next
            self._compare(len(self.buckets), bucket.metas, bucket.bytes)
            reading = self.group.attempt_each(partial(self._send, bucket))
            self.buckets.append(bucket.metas)
        self.group.answers(reading, "bucket")
        reasons = self.group.each("finish", version=version).values()
        self.can_repeat = not any(reasons) and bool(before)
        if before and not self.can_repeat and not self.reported and device.has_gpu():  # a CPU can never repeat
            self.reported = True
            say(f"weights: vLLM loads them again for every step: {next(filter(None, reasons))}")
        return sum(meta.bytes for meta in chain.from_iterable(self.buckets))

    def _compare(self, number: int, metas: list[wire.Meta], memory: torch.Tensor) -> None:
        """Compare a bucket's filling with the bytes from Bridge."""
        if self.fillings is None or self.proven:
            return
        own = self.fillings[number] if number < len(self.fillings) else None
        if own is None or [meta.name for meta in own.metas] != [meta.name for meta in metas]:
            self.unlike = metas[0].name
        else:
            filled = torch.empty_like(memory)
            own.fill(filled)
            self.unlike = filling.first_unlike(metas, filled, memory) or ""
        if self.unlike:
            self.fillings = None

    def _send(self, bucket: wire.Bucket, engine: Engine) -> None:
        shared = self._shared(bucket.memory) if self.transport == "ipc" else None
        engine.ask("bucket", {"metas": bucket.metas, "used": bucket.used, "shared": shared})
        if engine.pipe is not None:
            self._over(engine, "bucket", partial(engine.pipe.send, bucket.bytes))

    def _repeat(self, tensors: Tensors, version: int, export: Export | None) -> int:
        """Send all buckets again with new numbers."""
        if self.transport != "ipc":
            self.group.ask("repeat", {"version": version})  # engines prepare while this side does
        self._prepare(export)
        allocate, _ = self._memory()
        self.repeated = self.repeated or Buckets(self.buckets, self.device)
        self.repeated.begin()
        rooms = self.repeated.rooms(allocate)
        if self.transport == "ipc":
            self._repeat_shared(tensors, rooms, self.repeated)
            self.group.each("end_repeated", sums=self.repeated.digests().tolist(), version=version)
        else:
            self._repeat_over_pipes(tensors, rooms, self.repeated)
        if not self.proven and (more := next(tensors, None)):
            raise Fault(f"transfer of weights: {more[0]} came, but not in the transfer before")
        return self.repeated.bytes

    def _repeat_over_pipes(self, tensors: Tensors, rooms: list[torch.Tensor], repeated: Buckets) -> None:
        """Fill a bucket while the previous one is sent; send the digests of all after the last."""
        sending = list[list[tuple[Engine, Any]]]()
        for number, (room, used) in enumerate(zip(rooms, repeated.used, strict=True)):
            memory = room[:used]
            for engine, work in sending[number - 2] if number > 1 else ():
                self._attempt_over(engine, work.wait)
            self._fill(number, memory, tensors)
            repeated.add(number, memory)
            sending.append([])
            for engine in [*self.group.engines]:
                assert engine.pipe
                begin = partial(engine.pipe.broadcast, memory.to(engine.pipe.device))
                sending[-1] += [(engine, work) for work in self._attempt_over(engine, begin)]
        digests = repeated.digests()
        for engine in [*self.group.engines]:
            assert engine.pipe
            self._attempt_over(engine, partial(engine.pipe.send, digests))
        self.group.answers([*self.group.engines], "repeat")

    def _repeat_shared(self, tensors: Tensors, rooms: list[torch.Tensor], repeated: Buckets) -> None:
        reading = list[Engine]()
        for number, (room, used) in enumerate(zip(rooms, repeated.used, strict=True)):
            memory = room[:used]
            self._fill(number, memory, tensors)
            repeated.add(number, memory)
            if memory.is_cuda:  # the other process does not wait for this process's stream
                torch.cuda.current_stream().synchronize()
            self.group.answers(reading, "bucket")
            reading = self.group.ask("repeat_bucket", {"number": number, "shared": self._shared(room)})
        self.group.answers(reading, "bucket")

    def _fill(self, number: int, memory: torch.Tensor, tensors: Tensors) -> None:
        """Fill a bucket's memory."""
        if self.fillings and self.proven:
            self.fillings[number].fill(memory)
            return
        metas = self.buckets[number]
        for meta, place in wire.placed(metas):
            name, tensor = next(tensors, ("nothing", None))
            if name != meta.name or tensor is None:
                raise Fault(f"transfer of weights: {name} came in the place of {meta.name}")
            wire.part(memory, meta, place).copy_(tensor.detach())
        self._compare(number, metas, memory)

    def _shared(self, memory: torch.Tensor) -> Any:
        """Return the handle that opens the memory in another process. A second handle would never free the memory."""
        place = memory.data_ptr()
        self.handles[place] = self.handles.get(place) or shared_memory.shared(memory)
        return self.handles[place]

    def _attempt_over(self, engine: Engine, call: Callable[[], Any]) -> list[Any]:
        return self.group.attempt(engine, partial(self._over, engine, "repeat", call))

    def _over(self, engine: Engine, name: str, call: Callable[[], Any]) -> Any:
        """Make a call that sends data to the engine. If it fails, raise the reason that the engine reports."""
        try:
            return call()
        except RuntimeError:
            if engine.patience and not engine.connection.poll(AFTERWARDS):
                raise engine.lost(name) from None
            engine.answer(name)  # raises the engine's own error, if it has one
            raise

    def _join(self, engine: Engine) -> None:
        """Connect with an engine, if it is not connected yet."""
        if engine.joined:
            return
        if self.transport == "ipc":
            settings.require_reach(self.run)
            engine.call("join", host=None, port=None)
        else:
            port = hosts.free_port(engine.address)
            engine.ask("join", {"host": engine.address, "port": port})
            where = self.device if self.transport == "nccl" else wire.HOST
            try:
                end = (engine.address, port, 0, where, engine.is_gone, engine.patience)
                engine.pipe = wire.Pipe(*end, workers=cut(self.run))
            except RuntimeError:
                if engine.patience:
                    raise engine.lost("join") from None
                raise
            engine.answer("join")
        engine.joined = True

    def _memory(self) -> tuple[Callable[[int], torch.Tensor], int]:
        """Return the function that allocates memory for buckets, and the bytes of a bucket."""
        size = wire.BUCKET_OF_GPU if device.has_gpu() and self.transport != "gloo" else wire.BUCKET
        if self.transport == "ipc":
            return shared_memory.allocate, size
        return partial(torch.empty, dtype=torch.uint8, device=self.device), size
