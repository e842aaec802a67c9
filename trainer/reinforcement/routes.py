"""Routes: the experts that vLLM chose for each token, which the trainer's routers take in place of their own choice.

Trainer and engine round differently, and now and then that gives a token other experts: then both compute another
function. Routes go with each answer, from the journal on. Experts' weights are still the trainer's own: only the choice
is replayed, and gradients reach the routers as ever.
"""

# pyright: reportOptionalMemberAccess=false

import base64
from typing import Any

import torch

from contract.faults import Fault

BYTES = {1: torch.uint8, 2: torch.uint16}  # of an expert's number


def written(routes: Any) -> str:
    """Routes [tokens, layers, experts of a token] of vLLM's as a text."""
    _, layers, chosen = routes.shape
    return f"{layers},{chosen},{routes.dtype.itemsize}:{base64.b64encode(routes.tobytes()).decode()}"


def read(text: str) -> torch.Tensor:
    """Routes from a text."""
    form, _, data = text.partition(":")
    layers, chosen, size = map(int, form.split(","))
    found = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=BYTES[size])
    return found.view(-1, layers, chosen).long()


def nobody_s(tokens: int, like: torch.Tensor) -> torch.Tensor:
    """Routes of padding: any experts, each once."""
    _, layers, chosen = like.shape
    return torch.arange(chosen).expand(tokens, layers, chosen).clone()


def require_told(routes: torch.Tensor, tokens: int) -> None:
    """Require routes of each token that was read, some of which differ: an engine that tells none has zeros."""
    if len(routes) != tokens:
        raise Fault(f"reinforce.replay_experts: vLLM tells the experts of {len(routes)} tokens, and has read {tokens}")
    if routes.shape[2] > 1 and not (routes[..., :1] != routes[..., 1:]).any():
        raise Fault(
            "reinforce.replay_experts: vLLM tells the same expert for all choices of each token, so none at all"
        )


class Replay:
    """Routers of a model on this rank, and what they are to choose."""

    def __init__(self) -> None:
        self.routers: list[Any] = []

    def install(self, model: Any) -> None:
        """Find the routers. A head that predicts further tokens keeps its own choice: vLLM has none of it here."""
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.utils import unwrap_model

        for chunk in unwrap_model(model):
            for name, module in chunk.named_modules():
                if isinstance(module, TopKRouter) and not name.startswith("mtp"):
                    self.routers.append(module)

    def begin(self, routes: torch.Tensor) -> None:
        """Have routers choose these experts, [rows, tokens, layers, experts], also where layers are recomputed."""
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        of_tokens = routes.transpose(0, 1).flatten(0, 1)  # Megatron has the first token of each row first
        for router in self.routers:
            router.router_replay.clear_indices()
            router.router_replay.set_target_indices(of_tokens[:, router.layer_number - 1].contiguous())
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def end(self) -> None:
        """Have routers choose for themselves."""
        for router in self.routers:
            router.router_replay.clear_indices()
            router.router_replay.clear_router_replay_action()
