"""vLLM's WeightTransferEngine over gloo, for processes of one host, with or without a GPU.

vLLM 0.26 has nccl and ipc, both for GPUs. Between start and finish it loads layer by layer: a layer is built anew once
all of its tensors have come, which is why a transfer always sends every tensor.
"""

# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from trainer.reinforcement.wire import Meta, Pipe, taken_apart

NAME = "gloo"


@dataclass
class Init(base.WeightTransferInitInfo):
    port: int


@dataclass
class Update(base.WeightTransferUpdateInfo):
    metas: list[Meta]


class GlooEngine(base.WeightTransferEngine[Init, Update]):
    init_info_cls, update_info_cls = Init, Update
    pipe: Pipe

    def init_transfer_engine(self, init_info: Init) -> None:
        self.pipe = Pipe(init_info.port, rank=1)

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
        joined = self.pipe.receive(sum(one.bytes for one in update_info.metas))
        self.model.load_weights(taken_apart(update_info.metas, joined))

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("trainer/reinforcement/rollouts.py sends")


def register() -> None:
    WeightTransferEngineFactory.register_engine(NAME, GlooEngine)
