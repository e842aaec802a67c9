"""Routes: the experts that vLLM chose for each token, which the trainer's routers take in place of their own choice.

Trainer and engine round differently, and now and then that gives a token other experts: then both compute another
function. Routes go with each answer, from the journal on. Experts' weights are still the trainer's own: only the choice
is replayed, and gradients reach the routers as ever.
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
    """Routes [tokens, layers, experts of a token] of vLLM's as a text."""
    _, layers, chosen = routes.shape
    return f"{layers},{chosen},{routes.dtype.itemsize}:{base64.b64encode(routes.tobytes()).decode()}"


def read(text: str) -> torch.Tensor:
    """Routes from a text."""
    form, _, data = text.partition(":")
    layers, chosen, size = map(int, form.split(","))
    found = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=BYTES[size])
    return found.view(-1, layers, chosen)


def nobody_s(tokens: int, like: torch.Tensor) -> torch.Tensor:
    """Routes of padding: any experts, each once."""
    _, layers, chosen = like.shape
    return torch.arange(chosen, dtype=like.dtype).expand(tokens, layers, chosen).clone()


def require_told(routes: torch.Tensor, tokens: int) -> None:
    """Require routes of each token that was read, some of which differ: an engine that tells none has zeros."""
    if len(routes) != tokens:
        raise Fault(f"reinforce.replay_experts: vLLM tells the experts of {len(routes)} tokens, and has read {tokens}")
    if routes.shape[2] > 1 and not (routes[..., :1] != routes[..., 1:]).any():
        raise Fault(
            "reinforce.replay_experts: vLLM tells the same expert for all choices of each token, so none at all"
        )


class Choice:
    """Experts that a router is to choose, in the place of megatron-core's RouterReplay.

    Core's own tells forward and recompute apart by a switch for all routers, which pipelines cannot use.
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
        """Scores of the experts that are chosen, and these. Core calls this by its name."""
        if self.now is None:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = self.recomputed.take(self.now).long()
        if chosen.shape != (len(scores), topk):
            raise Fault(
                f"reinforce.replay_experts: a router reads {len(scores)} tokens and takes {topk} experts of each, and "
                f"was told those of {tuple(chosen.shape)}"
            )
        return scores.gather(1, chosen), chosen


class Replay:
    """Routers of a model on this rank, and what they are to choose."""

    def __init__(self) -> None:
        self.routers: dict[int, list[Any]] = {}  # by chunk of the model

    def install(self, model: Any) -> None:
        """Find the routers. A head that predicts further tokens keeps its own choice: vLLM has none of it here."""
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.utils import unwrap_model

        for chunk in unwrap_model(model):
            mine = self.routers.setdefault(id(chunk), [])
            for name, module in chunk.named_modules():
                if isinstance(module, TopKRouter) and not name.startswith("mtp"):
                    module.config.moe_router_fusion = False  # its kernel asks nobody
                    module.router_replay = Choice()
                    mine.append(module)

    def begin(self, chunk: Any, batch: dict[str, torch.Tensor]) -> None:
        """Have routers of a chunk choose the experts of a micro batch, also where layers are recomputed."""
        from megatron.core.utils import unwrap_model

        from trainer.megatron.whole_rows import of_this_rank

        routers = self.routers[id(unwrap_model(chunk))]
        if routers:
            # All at once: a copy for each layer would have the host wait for the GPU in each.
            here = batch["routes"].to("cuda", non_blocking=True)
            of_tokens = of_this_rank(here, batch.get("cu_seqlens_q"), routers[0].config.sequence_parallel)
            for router in routers:
                router.router_replay.begin(of_tokens[:, router.layer_number - 1])

    def end(self) -> None:
        """Have routers choose for themselves."""
        for router in chain(*self.routers.values()):
            router.router_replay.end()
