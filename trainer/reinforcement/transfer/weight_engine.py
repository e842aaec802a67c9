"""vLLM's side of a transfer of weights: its workers' WeightTransferEngine, over gloo, NCCL or shared memory.

Each of vLLM's workers has an engine and gets whole tensors: it compares their digests and loads its part of them.

vLLM 0.26 has engines named nccl and ipc. Both have no checksums, and its nccl needs vLLM in the sender's process.
Between start and finish vLLM loads layer by layer: it rebuilds a layer when all its tensors have arrived, which is why
a transfer always sends every tensor. Until then it keeps the arrived tensors, which therefore must not be in memory
that the sender fills again.

All this takes Python code for each tensor. If a model allows it, the third and later transfers are repeated: the same
buckets with other numbers, which are copied to the targets of the first two (repeated/loading.py).
"""

# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false, reportArgumentType=false

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from contract.faults import Fault
from trainer.patches import vllm_cpu
from trainer.reinforcement.transfer import wire
from trainer.reinforcement.transfer.repeated import loading
from trainer.reinforcement.transfer.repeated.buckets import Buckets
from trainer.weights import digests

WORKER = f"{__name__}.Worker"


@dataclass
class Init(base.WeightTransferInitInfo):
    host: str | None = None
    port: int | None = None


@dataclass
class Update(base.WeightTransferUpdateInfo):
    metas: list[wire.Meta]
    used: int  # bytes of the bucket
    shared: tuple | None = None  # handle of the sender's memory


class BucketEngine(base.WeightTransferEngine[Init, Update]):
    """Whole weights in buckets; each tensor is checked against its digest on the model's device."""

    init_info_cls, update_info_cls = Init, Update
    arrived: set[str]  # names of the tensors that were loaded since the start
    buckets: list[list[wire.Meta]]  # tensors of each bucket since the start
    repeated: Buckets | None = None  # the same buckets, after the first repetition
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
            self.learned, self.watch = self.watch.ended(), None
        elif self.learned:
            self.learned.compare(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. The base class waits for an accelerator here, which a CPU host does not have."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        memory = self.received(update_info)
        if self.watch:
            self.watch.arrived(len(self.buckets), memory)
        self.buckets.append(update_info.metas)
        # Checking the digests on the host also makes sure that the whole bucket has been read.
        tensors = self.recorded(wire.taken_apart(update_info.metas, memory))
        with self.watch or contextlib.nullcontext():
            self.model.load_weights(tensors)

    def cannot_repeat(self, sleeps: bool) -> str:
        """The reason why a transfer cannot be repeated, or "". `sleeps`: vLLM sleeps before each transfer."""
        return self.learned.refused(self.model, sleeps) if self.learned else "no transfer was recorded"

    def known(self) -> Buckets:
        """The buckets of the last whole transfer."""
        self.repeated = self.repeated or Buckets(self.buckets, torch.device(self.device))
        return self.repeated

    def put(self, number: int, memory: torch.Tensor) -> None:
        """Copy a repeated bucket to its targets."""
        assert self.learned
        self.known().add(number, memory)
        self.learned.put(number, memory)

    def require(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Raise a Fault unless all tensors have the digests with which they were sent."""
        for place in (received != sent).nonzero().flatten().tolist()[:1]:
            name = [meta.name for metas in self.buckets for meta in metas][place]
            now, then = (digests.text(int(values[place])) for values in (received, sent))
            raise Fault(f"transfer of weights: {name} is not what was sent: digest {now}, not {then}")

    def recorded(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors on and record each as arrived after it was used."""
        for name, tensor in tensors:
            yield name, tensor
            self.arrived.add(name)

    def received(self, update_info: Update) -> torch.Tensor:
        """The bucket in memory that the sender does not use."""
        raise NotImplementedError

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("trainer/reinforcement/rollouts.py sends")


class GlooEngine(BucketEngine):
    """Buckets over gloo, from host memory to host memory."""

    pipe: wire.Pipe
    on_device = False  # whether buckets arrive in the memory of the model's device

    def init_transfer_engine(self, init_info: Init) -> None:
        assert init_info.host and init_info.port
        workers, rank = self.parallel_config.world_size, 1 + self.parallel_config.rank
        end = torch.device(self.device) if self.on_device else wire.HOST
        self.pipe = wire.Pipe(init_info.host, init_info.port, rank, end, workers=workers)

    def received(self, update_info: Update) -> torch.Tensor:
        return self.pipe.receive(update_info.used).to(self.device)

    def repeat(self) -> None:
        """Receive all buckets again. While one is copied to its targets, the next one arrives."""
        known = self.known()
        known.begin()
        rooms = known.rooms(partial(torch.empty, dtype=torch.uint8, device=self.pipe.device))
        memories = [room[:count] for room, count in zip(rooms, known.used, strict=True)]
        works = [self.pipe.broadcast(memory) for memory in memories[:2]]
        for number, memory in enumerate(memories):
            works[number].wait()
            self.put(number, memory.to(self.device))
            if number + 2 < len(memories):
                works.append(self.pipe.broadcast(memories[number + 2]))
        received = known.digests().to(self.pipe.device)
        sent = torch.empty_like(received)
        self.pipe.finish(self.pipe.broadcast(sent))
        self.require(received, sent)


class NcclEngine(GlooEngine):
    """Buckets over NCCL, from GPU to GPU. On a CPU, gloo does the same."""

    on_device = True


class SharedEngine(BucketEngine):
    """Memory that both processes share: of the GPU by CUDA's IPC handles, or of a host without a GPU.

    A worker on another GPU reads the memory of the trainer's first GPU over the link between them: CUDA maps a handle
    for the GPU of the process that opens it, and enables access between the two.
    """

    def init_transfer_engine(self, init_info: Init) -> None:
        self.opened: dict[Any, torch.Tensor] = {}

    def received(self, update_info: Update) -> torch.Tensor:
        assert update_info.shared
        return self.view(update_info.shared, update_info.used).clone()

    def view(self, shared: tuple, used: int) -> torch.Tensor:
        from trainer.reinforcement.transfer import shared_memory

        key = shared_memory.key(shared)
        if key not in self.opened:
            self.opened[key] = shared_memory.opened(shared, self.device)
        return self.opened[key][:used]

    def finish_weight_update(self) -> None:
        self.close()
        super().finish_weight_update()

    def repeat(self, number: int, shared: tuple) -> None:
        """Receive a bucket again. The sender may fill its memory again when this returns."""
        known = self.known()
        if number == 0:
            known.begin()
        self.put(number, self.view(shared, known.used[number]))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def end_repeated(self, sums: list[int]) -> None:
        self.require(self.known().digests().cpu(), torch.tensor(sums))
        self.close()

    def close(self) -> None:
        self.opened.clear()  # otherwise the sender could not free its memory


ENGINES = {"gloo": GlooEngine, "nccl": NcclEngine, "ipc": SharedEngine}  # by transport


def name(transport: str) -> str:
    """Name of a transport's engine for vLLM, different from vLLM's engines ipc and nccl."""
    return f"buckets-{transport if transport in ENGINES else 'gloo'}"


for transport, engine in ENGINES.items():
    WeightTransferEngineFactory.register_engine(name(transport), engine)  # each worker looks it up by its name


class Worker:
    """Additional methods of vLLM's workers, for its collective_rpc: an engine has a worker for each of its GPUs.

    vLLM imports this module in every worker, because of its setting worker_extension_cls, and adds this class to its
    own. If an engine has several workers, each is a process; the worker of an engine on one GPU runs in the engine's
    process.
    """

    weight_transfer_engine: Any
    model_runner: Any

    def answer_or_fault(self, name: str, arguments: dict[str, Any]) -> tuple[Any, str | None]:
        """Call a method of this worker or of its weight_transfer_engine, by its dotted name.

        Returns its result, or the line of a Fault, which vLLM would report like any other error.
        """
        try:
            return attrgetter(name)(self)(**arguments), None
        except Fault as fault:
            return None, str(fault)

    def arrived_tensors(self) -> frozenset[str]:
        """Names of all tensors that arrived undamaged since the transfer began, and were loaded."""
        return frozenset(self.weight_transfer_engine.arrived)

    def seed_draws(self, seed: int) -> None:
        """Seed the generators that vLLM uses for requests without a seed."""
        import numpy

        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)

    def tell_routes(self) -> None:
        """Make the routers on a CPU record which experts they choose."""
        vllm_cpu.tell_routes(self.model_runner.get_model())
