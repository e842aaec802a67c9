"""vLLM's WeightTransferEngine for processes of one host: over gloo or NCCL, or through memory that both see.

Each of vLLM's workers has one, and is given whole tensors: it compares their digests and loads its part of them.

vLLM 0.26 brings nccl and ipc of its own. Both are without checksums, and its nccl wants vLLM in the sender's process as
well. Between start and finish it loads layer by layer: a layer is
built anew once all of its tensors have come, which is why a transfer always sends every tensor. Until then it keeps
those that have come, so that none may lie in memory that the sender fills again.
"""

# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false, reportArgumentType=false

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from trainer.reinforcement.transfer import wire


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

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.arrived = set()
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. The base class waits for an accelerator here, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        memory = self.received(update_info)
        # The digests are known on the host only when all of the bucket has been read.
        self.model.load_weights(self.noted(wire.taken_apart(update_info.metas, memory)))

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
        from trainer.reinforcement.transfer import shared_memory

        assert update_info.shared
        key = shared_memory.key(update_info.shared)
        if key not in self.opened:
            self.opened[key] = shared_memory.opened(update_info.shared, self.device)
        return self.opened[key][: update_info.used].clone()

    def finish_weight_update(self) -> None:
        self.opened.clear()  # or the sender could not free it
        super().finish_weight_update()


ENGINES = {"gloo": GlooEngine, "nccl": NcclEngine, "ipc": SharedEngine}  # by transport


def name(transport: str) -> str:
    """Name that vLLM knows the engine of a transport by. It has an ipc and an nccl of its own."""
    return f"buckets-{transport if transport in ENGINES else 'gloo'}"


def register() -> None:
    for transport, engine in ENGINES.items():
        WeightTransferEngineFactory.register_engine(name(transport), engine)
