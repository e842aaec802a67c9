"""vLLM's WeightTransferEngine for processes of one host: over gloo or NCCL, or through memory that both see.

Each of vLLM's workers has one, and is given whole tensors: it compares their digests and loads its part of them.

vLLM 0.26 brings nccl and ipc of its own. Both are without checksums, and its nccl wants vLLM in the sender's process as
well. Between start and finish it loads layer by layer: a layer is
built anew once all of its tensors have come, which is why a transfer always sends every tensor. Until then it keeps
those that have come, so that none may lie in memory that the sender fills again.

All that takes Python for each tensor. Where a model allows it, the third transfer and those behind it are repeated: the
same buckets with other numbers, which go where those of the first two have gone (repeated/loading.py).
"""

# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false, reportArgumentType=false

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from contract.faults import Fault
from trainer.reinforcement.transfer import wire
from trainer.reinforcement.transfer.repeated import loading
from trainer.reinforcement.transfer.repeated.buckets import Buckets
from trainer.weights import digests


@dataclass
class Init(base.WeightTransferInitInfo):
    host: str | None = None
    port: int | None = None


@dataclass
class Update(base.WeightTransferUpdateInfo):
    metas: list[wire.Meta]
    used: int  # bytes of the bucket
    shared: tuple | None = None  # what opens the sender's memory


class BucketEngine(base.WeightTransferEngine[Init, Update]):
    """Whole weights in buckets, each tensor held against its digest where the model lies."""

    init_info_cls, update_info_cls = Init, Update
    arrived: set[str]  # names of the tensors that were loaded since the start
    buckets: list[list[wire.Meta]]  # what has come in each since the start
    repeated: Buckets | None = None  # the same, once they have been repeated
    watch: loading.Watch | None = None  # of the first transfer
    learned: loading.Learned | None = None

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.arrived, self.buckets, self.repeated = set(), [], None
        self.watch = None if self.learned else loading.Watch(self.model)
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self.watch or contextlib.nullcontext():
            finalize_layerwise_reload(self.model, self.model_config)
        if self.watch:
            self.learned, self.watch = loading.Learned(self.model, self.watch.ended()), None
        elif self.learned:
            self.learned.hold_against(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. The base class waits for an accelerator here, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        memory = self.received(update_info)
        if self.watch:
            self.watch.arrived(len(self.buckets), memory)
        self.buckets.append(update_info.metas)
        # The digests are known on the host only when all of the bucket has been read.
        tensors = self.noted(wire.taken_apart(update_info.metas, memory))
        with self.watch or contextlib.nullcontext():
            self.model.load_weights(tensors)

    def cannot_repeat(self, sleeps: bool) -> str:
        """The reason that a transfer cannot be repeated; empty where it can. `sleeps`: vLLM sleeps before each."""
        return self.learned.refused(self.model, sleeps) if self.learned else "nothing was learned of a transfer"

    def known(self) -> Buckets:
        """The buckets of the last whole transfer."""
        self.repeated = self.repeated or Buckets(self.buckets, torch.device(self.device))
        return self.repeated

    def taken(self, number: int, memory: torch.Tensor) -> None:
        """Put a bucket that is repeated to where it goes."""
        assert self.learned
        self.known().add(number, memory)
        self.learned.loading.put(number, memory)

    def require(self, found: torch.Tensor, sent: torch.Tensor) -> None:
        """Require that all tensors have the digests that they were sent with."""
        for place in (found != sent).nonzero().flatten().tolist()[:1]:
            name = [one.name for metas in self.buckets for one in metas][place]
            now, then = (digests.text(int(one[place])) for one in (found, sent))
            raise Fault(f"transfer of weights: {name} is not what was sent: digest {now}, not {then}")

    def noted(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors as they are taken, each of which has arrived then."""
        for name, tensor in tensors:
            yield name, tensor
            self.arrived.add(name)

    def received(self, update_info: Update) -> torch.Tensor:
        """The bucket in memory that is its own."""
        raise NotImplementedError

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("trainer/reinforcement/rollouts.py sends")


class GlooEngine(BucketEngine):
    """Buckets that come over gloo, from memory of the host to memory of the host."""

    pipe: wire.Pipe

    def init_transfer_engine(self, init_info: Init) -> None:
        assert init_info.host and init_info.port
        workers = self.parallel_config.world_size
        place = 1 + self.parallel_config.rank
        self.pipe = wire.Pipe(init_info.host, init_info.port, place, self.ends_in(), workers=workers)

    def ends_in(self) -> torch.device:
        return wire.HOST

    def received(self, update_info: Update) -> torch.Tensor:
        return self.pipe.receive(update_info.used).to(self.device)

    def repeat(self) -> None:
        """Take all buckets once more. While one is put to its place, the next comes in."""
        known = self.known()
        known.begin()
        rooms = known.rooms(partial(torch.empty, dtype=torch.uint8, device=self.pipe.device))
        come = [room[:count] for room, count in zip(rooms, known.used, strict=True)]
        works = [self.pipe.broadcast(memory) for memory in come[:2]]
        for number, memory in enumerate(come):
            works[number].wait()
            self.taken(number, memory.to(self.device))
            if number + 2 < len(come):
                works.append(self.pipe.broadcast(come[number + 2]))
        found = known.digests().to(self.pipe.device)
        sent = torch.empty_like(found)
        self.pipe.finish(self.pipe.broadcast(sent))
        self.require(found, sent)


class NcclEngine(GlooEngine):
    """Buckets that come over NCCL, from GPU to GPU. On a CPU it is gloo, by the same steps."""

    def ends_in(self) -> torch.device:
        return torch.device(self.device)


class SharedEngine(BucketEngine):
    """Memory that both processes see: of the GPU, by CUDA's IPC handles, or of a host without one.

    A worker on another GPU than the trainer's first one reads that one's memory over what lies between them: CUDA maps
    a handle for the GPU of the process that opens it, and lets the two reach one another.
    """

    def init_transfer_engine(self, init_info: Init) -> None:
        self.opened: dict[Any, torch.Tensor] = {}

    def received(self, update_info: Update) -> torch.Tensor:
        assert update_info.shared
        return self.seen(update_info.shared, update_info.used).clone()

    def seen(self, shared: tuple, used: int) -> torch.Tensor:
        from trainer.reinforcement.transfer import shared_memory

        key = shared_memory.key(shared)
        if key not in self.opened:
            self.opened[key] = shared_memory.opened(shared, self.device)
        return self.opened[key][:used]

    def finish_weight_update(self) -> None:
        self.close()
        super().finish_weight_update()

    def repeat(self, number: int, shared: tuple) -> None:
        """Take a bucket once more. The sender may fill its memory again when this returns."""
        known = self.known()
        if number == 0:
            known.begin()
        self.taken(number, self.seen(shared, known.used[number]))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def end_repeated(self, sums: list[int]) -> None:
        self.require(self.known().digests().cpu(), torch.tensor(sums))
        self.close()

    def close(self) -> None:
        self.opened.clear()  # or the sender could not free it


ENGINES = {"gloo": GlooEngine, "nccl": NcclEngine, "ipc": SharedEngine}  # by transport


def name(transport: str) -> str:
    """Name that vLLM knows the engine of a transport by. It has an ipc and an nccl of its own."""
    return f"buckets-{transport if transport in ENGINES else 'gloo'}"


def register() -> None:
    for transport, engine in ENGINES.items():
        WeightTransferEngineFactory.register_engine(name(transport), engine)
