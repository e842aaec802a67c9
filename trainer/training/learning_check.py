"""Check after a few steps that every trained tensor learns. If not, stop with the reason instead of wasting GPUs.

In several frameworks, a frozen base combined with recomputation gave finite losses and zero gradients. The same happens
if adapters are not attached, or only to some layers. After STEPS steps each trained tensor must have had a gradient and
must have changed; trainer/training/learning_verdict.py decides. With adapters, A has no gradient while B is zero, so A
is checked one step later. The check also logs the layout and recomputation in Megatron's final configuration.

It has a cost only in the first steps after each start: sums per tensor on the device, digests
(trainer/weights/digests.py) of the trained tensors before and after, one synchronisation with the device per check, and
numbers and names sent between ranks.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import itertools
import re
from dataclasses import dataclass
from functools import partial

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model

from conf.schema.run import Run
from contract.faults import Fault
from trainer.startup.console import say
from trainer.training import learning_verdict
from trainer.weights import atomic_folder, coverage, digests

STEPS = 2  # with a warm-up, the learning rate of the first step may be 0
A = ".adapter.linear_in.weight"
ONE_EXPERT = re.compile(r"\.local_experts\.(\d+)\.|\.experts\..*\.(?:weight|bias)(\d+)$")


class LearningCheck(Callback):
    def __init__(self, run: Run, metrics):
        self.run, self.metrics, self.steps = run, metrics, 0

    def on_train_start(self, context) -> None:
        effective = _effective(context.state.cfg.model)
        self.metrics.write({"kind": "effective", "step": context.state.train_state.step, **effective})
        say("running with " + ", ".join(f"{key} {value}" for key, value in effective.items()))
        self.tensors = [tensor for tensor in _trained(context.model) if not _learns_nothing(tensor.name, context)]
        self.tokens = Tokens(context.model)
        self.before = self._values()
        self.gradients = torch.zeros_like(self.before[0], dtype=torch.bool)

    def on_train_step_end(self, context) -> None:
        if not hasattr(self, "tensors"):  # the check is over
            return
        if context.skipped_iter:  # fp16 gradients overflowed: no tensor changes in this step
            self.gradients.zero_()
            return
        self.steps += 1
        self.gradients |= _per_part(self.tensors, _gradient) != 0
        if self.steps == STEPS:
            observations, self.needed = self._observations(), self.tokens.take()
            inner = {key: observed for key, observed in observations.items() if key[0].endswith(A)}
            outer = {key: observed for key, observed in observations.items() if key not in inner}
            self._require(context, learning_verdict.judge(outer, self.needed))
            self.gradients.zero_()
            if not inner:
                self._end()
        elif self.steps == STEPS + 1:
            inner = {key: observed for key, observed in self._observations().items() if key[0].endswith(A)}
            # If an expert got no token before, its B is still zero, and its A has no gradient.
            needed = {layer: experts & self.needed[layer] for layer, experts in self.tokens.take().items()}
            self._require(context, learning_verdict.judge(inner, needed, every_layer=False))
            self._end()

    def on_train_end(self, context) -> None:
        if self.steps < STEPS:
            say(f"learning check: skipped, because this start ran {self.steps} steps and the check needs {STEPS}")

    def _end(self) -> None:
        self.tokens.remove()
        del self.tensors, self.before, self.gradients, self.tokens

    def _values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Digests of the model's values and of the optimizer's exact copies."""
        return _per_part(self.tensors, _digest), _per_part(self.tensors, _exact_digest)

    def _observations(self) -> dict[learning_verdict.Key, learning_verdict.Observation]:
        """Observations of the whole model, on every rank."""
        values, exact = ((now != before).tolist() for now, before in zip(self._values(), self.before, strict=True))
        flags = zip(self.gradients.tolist(), values, exact, strict=True)
        of_rank = {}
        for tensor in self.tensors:
            rounded = tensor.parameter.element_size() < 4
            for key in tensor.keys:
                gradient, changed, moved = next(flags)
                copied = _exact(tensor.parameter) is not None
                of_rank[key] = learning_verdict.Observation(gradient, changed, moved if copied else None, rounded)
        return learning_verdict.combined(atomic_folder.gather(of_rank))

    def _require(self, context, verdict: learning_verdict.Verdict) -> None:
        """Raise a Fault if the verdict has faults: on all ranks, because otherwise some would wait for the others."""
        norm, faults = context.grad_norm, verdict.faults
        if not (norm and norm > 0):
            faults = [f"the gradient norm is {norm}", *faults]
        if faults:
            share = "not everything is learned" if verdict.learned else "nothing is learned"
            more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
            raise Fault(f"{share} after {self.steps} steps: {faults[0]}{more}")
        result = f"all {verdict.count} {self._kind()} learn: {verdict}"
        say(f"learning check: after {self.steps} steps {result}; gradient norm {norm:.3g}")

    def _kind(self) -> str:
        if self.run.adapter.kind == "none":
            return "weights"
        magnitudes = " and magnitudes" if self.run.adapter.kind == "dora" else ""
        return "inner matrices (A) of adapters" if self.steps > STEPS else f"outer matrices (B){magnitudes} of adapters"


@dataclass(frozen=True)
class Tensor:
    """A trained tensor, or this rank's part of it. A tensor that holds several experts has a key for each of them."""

    name: str
    parameter: torch.nn.Parameter
    keys: tuple[learning_verdict.Key, ...]


class Tokens:
    """Record of the experts that got a token with a gradient at the layer's output. These experts must learn.

    A hook on the router records which experts each token goes to; a hook on the layer's output records which tokens
    have a gradient.
    """

    def __init__(self, model):
        self.routes: dict[str, torch.Tensor] = {}
        self.reached: dict[str, torch.Tensor] = {}
        self.hooks = []
        for layer, module in _expert_layers(model):
            self.reached[layer] = torch.zeros(module.config.num_moe_experts or 0, dtype=torch.bool, device="cuda")
            self.hooks.append(module.router.register_forward_hook(partial(self._route, layer)))
            self.hooks.append(module.register_forward_hook(partial(self._watch, layer)))

    def take(self) -> dict[str, set[int]]:
        """Experts of the whole model that got such a token since the last call, by layer, on every rank."""
        of_rank = {layer: reached.nonzero().flatten().tolist() for layer, reached in self.reached.items()}
        for reached in self.reached.values():
            reached.zero_()
        union: dict[str, set[int]] = {}
        for layers in atomic_folder.gather(of_rank):
            for layer, experts in layers.items():
                union.setdefault(layer, set()).update(experts)
        return union

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _route(self, layer: str, _router, _inputs, outputs) -> None:
        self.routes[layer] = outputs[1].detach().bool()

    def _watch(self, layer: str, _module, _inputs, outputs) -> None:
        output, routes = outputs[0], self.routes.pop(layer, None)
        if output.requires_grad and routes is not None:  # the first pass of a recomputed layer has no gradient
            output.register_hook(partial(self._reach, layer, routes))

    def _reach(self, layer: str, routes: torch.Tensor, gradient: torch.Tensor) -> None:
        has_gradient = (gradient != 0).flatten(0, -2).any(-1)
        self.reached[layer] |= (routes & has_gradient[:, None]).any(0)


def _trained(model) -> list[Tensor]:
    experts = unwrap_model(model)[0].config.num_moe_experts
    trained = [(name, tensor) for name, tensor in coverage.named_tensors(model) if tensor.requires_grad]
    return [Tensor(name, tensor, tuple(_keys(name, tensor, experts))) for name, tensor in trained]


def _keys(name: str, parameter, experts: int | None) -> list[learning_verdict.Key]:
    if experts is None or ".experts." not in name:
        return [(name, None)]
    ways = parallel_state.get_expert_model_parallel_world_size()
    first = experts // ways * parallel_state.get_expert_model_parallel_rank()
    if ".adapter." in name and parameter.ndim == 3:
        return [(name, first + i) for i in range(len(parameter))]
    if match := ONE_EXPERT.search(name):
        number = int(match[1] or match[2])
        return [(name, first + number if ".adapter." in name else number)]  # Bridge numbers adapters by rank
    return [(name, None)]  # one adapter for all experts of a layer


def _expert_layers(model):
    modules = itertools.chain.from_iterable(chunk.modules() for chunk in unwrap_model(model))
    layers = {id(module.router.weight): module for module in modules if isinstance(module, MoELayer)}
    for name, tensor in coverage.named_tensors(model):
        if id(tensor) in layers:
            yield name.removesuffix(".router.weight"), layers[id(tensor)]


def _learns_nothing(name: str, context) -> bool:
    """Whether the run's configuration keeps a tensor from learning.

    Its loss may have weight zero, or its router may choose one expert only, whose weight is always 1.
    """
    model = context.state.cfg.model
    unweighted = name.startswith("mtp.") and not model.mtp_loss_scaling_factor
    return unweighted or (".router." in name and model.moe_router_topk == 1)


def _per_part(tensors: list[Tensor], measure) -> torch.Tensor:
    """One number for each tensor, or for each expert of a tensor that holds several."""
    return torch.cat([measure(t.parameter, int(len(t.keys) > 1)).reshape(-1).expand(len(t.keys)) for t in tensors])


def _gradient(parameter, depth: int) -> torch.Tensor:
    gradient = getattr(parameter, "main_grad", parameter.grad)
    if gradient is None:
        return torch.zeros(parameter.shape[:depth], device=parameter.device)
    return torch.linalg.vector_norm(gradient.flatten(depth), ord=float("inf"), dim=-1).float()


def _digest(parameter, depth: int) -> torch.Tensor:
    return digests.sums(parameter, (0,) * parameter.ndim, depth)


def _exact(parameter) -> torch.Tensor | None:
    """This rank's part of the optimizer's fp32 copy of 16-bit weights; experts of one tensor share one result."""
    copy = getattr(parameter, "main_param", None)
    return copy if copy is not None and copy.numel() and copy.device == parameter.device else None


def _exact_digest(parameter, depth: int) -> torch.Tensor:
    copy = _exact(parameter)
    if copy is None:
        return torch.zeros(1, dtype=torch.int64, device=parameter.device)
    return digests.sums(copy, (0,) * copy.ndim)


def _effective(model) -> dict:
    recompute = model.recompute_granularity or "none"
    if recompute == "selective":
        recompute += " " + "+".join(model.recompute_modules)
    if recompute == "full":
        recompute += f" {model.recompute_method} {model.recompute_num_layers}"
    return {
        "world": atomic_folder.ranks(),
        "tp": model.tensor_model_parallel_size,
        "sp": model.sequence_parallel,
        "pp": model.pipeline_model_parallel_size,
        "vpp": model.virtual_pipeline_model_parallel_size,
        "cp": model.context_parallel_size,
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": model.expert_model_parallel_size,
        "etp": model.expert_tensor_parallel_size,
        "recompute": recompute,
        "precision": str(model.params_dtype).removeprefix("torch."),
    }
