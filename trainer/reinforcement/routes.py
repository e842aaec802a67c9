"""Routes: the experts that vLLM chose for each token, which the trainer's routers then use instead of their own choice.

Trainer and engine round differently. Therefore they sometimes choose different experts for a token, and then compute
different functions. Routes are stored with each answer, also in the journal. Only the choice is replayed: the trainer
computes the experts' weights, and gradients reach the routers as usual.
"""

# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import base64
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from contract.faults import Fault
from trainer.megatron.routers.recomputed import Recomputed

BYTES = {1: torch.uint8, 2: torch.int16}  # of an expert's number, which is below 2 ** 15


def written(routes: Any) -> str:
    """vLLM's routes [tokens, layers, experts of a token] as text."""
    _, layers, chosen = routes.shape
    return f"{layers},{chosen},{routes.dtype.itemsize}:{base64.b64encode(routes.tobytes()).decode()}"


def read(text: str) -> torch.Tensor:
    """Routes from a text."""
    form, _, data = text.partition(":")
    layers, chosen, size = map(int, form.split(","))
    values = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=BYTES[size])
    return values.view(-1, layers, chosen)


def unknown(tokens: int, like: torch.Tensor) -> torch.Tensor:
    """Routes of padding: arbitrary experts, each once."""
    _, layers, chosen = like.shape
    return torch.arange(chosen, dtype=like.dtype).expand(tokens, layers, chosen).clone()


def require_known(routes: torch.Tensor, tokens: int) -> None:
    """Raise a Fault unless each token has routes and some of them differ: without routes, vLLM returns zeros."""
    if len(routes) != tokens:
        raise Fault(f"reinforce.replay_experts: vLLM returned routes of {len(routes)} tokens, but has read {tokens}")
    if routes.shape[2] > 1 and not (routes[..., :1] != routes[..., 1:]).any():
        raise Fault("reinforce.replay_experts: vLLM returned the same expert for all choices of each token: not routes")


class Choice:
    """Experts that a router must choose, instead of megatron-core's RouterReplay.

    RouterReplay distinguishes forward and recompute by a switch for all routers, which does not work with pipelines.
    """

    def __init__(self) -> None:
        self.now: torch.Tensor | None = None
        self.recomputed: Recomputed[torch.Tensor] = Recomputed()

    def begin(self, chosen: torch.Tensor) -> None:
        self.now = chosen

    def end(self) -> None:
        self.now = None
        self.recomputed.kept.clear()

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: Callable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers of the chosen experts. Megatron-core calls this method by its name."""
        if self.now is None:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = self.recomputed.take(self.now).long()
        if chosen.shape != (len(scores), topk):
            raise Fault(
                f"reinforce.replay_experts: a router needs {topk} experts for each of {len(scores)} tokens, but the "
                f"routes have the shape {tuple(chosen.shape)}"
            )
        return scores.gather(1, chosen), chosen


class Replay:
    """Routers of a model on this rank, and the experts that they must choose."""

    def __init__(self) -> None:
        self.routers: dict[int, list[Any]] = {}  # by chunk of the model

    def install(self, model: Any) -> None:
        """Find the routers. Layers for multi-token prediction keep their own choice: vLLM does not run them here."""
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.utils import unwrap_model

        for chunk in unwrap_model(model):
            routers = self.routers.setdefault(id(chunk), [])
            for name, module in chunk.named_modules():
                if isinstance(module, TopKRouter) and not name.startswith("mtp"):
                    module.config.moe_router_fusion = False  # the fused kernel ignores router_replay
                    module.router_replay = Choice()
                    routers.append(module)

    def begin(self, chunk: Any, batch: dict[str, torch.Tensor]) -> None:
        """Make the routers of a chunk choose the experts of a micro batch, also when layers are recomputed."""
        from megatron.core.utils import unwrap_model

        from trainer.megatron.whole_rows import of_this_rank

        routers = self.routers[id(unwrap_model(chunk))]
        if routers:
            # One copy for all layers: with a copy in each layer, the host would wait for the GPU each time.
            on_device = batch["routes"].to("cuda", non_blocking=True)
            of_tokens = of_this_rank(on_device, batch.get("cu_seqlens_q"), routers[0].config.sequence_parallel)
            for router in routers:
                router.router_replay.begin(of_tokens[:, router.layer_number - 1])

    def end(self) -> None:
        """Let the routers choose experts themselves again."""
        for router in chain(*self.routers.values()):
            router.router_replay.end()
