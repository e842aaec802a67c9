"""vLLM's WeightTransferEngine for processes of one host: over gloo or NCCL, or through memory that both see.

vLLM 0.26 brings nccl and ipc of its own. Both are without checksums, and its nccl wants vLLM in the sender's process as
well. Between start and finish it loads layer by layer: a layer is
built anew once all of its tensors have come, which is why a transfer always sends every tensor. Until then it keeps
those that have come, so that none may lie in memory that the sender fills again.
"""

# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false, reportArgumentType=false

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

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

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
        self.model.load_weights(iter(wire.taken_apart(update_info.metas, memory)))

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
        self.pipe = wire.Pipe(init_info.host, init_info.port, 1, self.ends_in())

    def ends_in(self) -> torch.device:
        return wire.HOST

    def received(self, update_info: Update) -> torch.Tensor:
        return self.pipe.receive(update_info.used).to(self.device)


class NcclEngine(GlooEngine):
    """Buckets that come over NCCL, from GPU to GPU. On a CPU it is gloo, by the same steps."""

    def ends_in(self) -> torch.device:
        return torch.device(self.device)


class SharedEngine(BucketEngine):
    """Memory that both processes see: of the GPU, by CUDA's IPC handles, or of a host without one."""

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
