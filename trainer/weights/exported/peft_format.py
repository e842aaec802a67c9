"""Write a trained adapter as PEFT's LoRA or DoRA: adapter_config.json and adapter_model.safetensors.

Megatron's fused layers become one adapter per released weight: A is the same, B is cut by rows.

Experts. transformers 5 keeps all experts of a layer in two 3D parameters, gate_up_proj (up_proj if it has no gate) and
down_proj, which PEFT adapts as `target_parameters`. For E experts of rank r the file has, per parameter, A of shape
[E * r, in], expert by expert, and B of shape [out, r * E], in which the columns of one expert are E apart. PEFT nests
the wrappers of a module's two parameters; the inner one, the first, is called base_layer. gpt-oss is released in this
form, with alternating rows of gate and up; the rows of B alternate in the same way.

Mamba layers. PEFT (0.21) refuses to load an adapter of out_proj, which Mamba's kernels bypass. vLLM does not bypass it.

Dense layers in models with experts. For these architectures PEFT (0.21) treats gate_proj, up_proj and down_proj in
`target_modules` as transformers 4's names of experts and replaces them, so other layers of these names would lose their
adapters. Their weights are therefore also named as `target_parameters`. PEFT has no DoRA for parameters.

transformers does not build multi-token-prediction layers, so their adapters cannot be included; merged/ has them.
"""

# pyright: reportArgumentType=false

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from conf import families
from conf.peft_adapter import CONFIG, EXPERT, LEAVES, STACK, WEIGHTS, module
from contract.faults import Fault
from trainer.weights import new_safetensors, released
from trainer.weights.exported.parts import READABLE
from trainer.weights.merge import Adapter
from trainer.weights.released_tensors import DTYPES, as_bytes
from trainer.weights.trained import Trained

MLP = ("gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Adapters = dict[str, tuple[Adapter, ...]]


class Row(NamedTuple):
    """A tensor of the file, made when it is written."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


def check(trained: Trained) -> None:
    """Raise a Fault for an adapter that PEFT cannot represent."""
    moe = _has_experts(trained)
    bad = [name for name, one in _expressible(trained).items() if one[0].magnitude and _as_parameter(name, moe)]
    if bad:
        raise Fault(
            f"export.formats: PEFT has no DoRA for {released.enumerate_names(bad, 3)}; export as merged only, "
            "or train only linear_qkv and linear_proj"
        )


def write(trained: Trained, folder: Path, source: str) -> list[str]:
    """Write the adapter. Return the released names whose adapters are left out."""
    adapters, moe = _expressible(trained), _has_experts(trained)
    experts = _experts(adapters)
    folder.mkdir(parents=True, exist_ok=True)
    _write_safetensors(folder / WEIGHTS, tensors(trained))
    plain = {name for name in adapters if not _is_of_expert(name)}
    modules = _shortest({module(name) for name in plain if not _as_parameter(name, moe)}, trained, 1)
    parameters = _shortest({f"{module(name)}.weight" for name in plain if _as_parameter(name, moe)}, trained, 3)
    stacks = {_ending(f"{name}.{leaf}", 3) for name, of_layer in experts.items() for leaf in _leaves(of_layer[0])}
    parameters += sorted(stacks)
    text = json.dumps(_config(next(iter(adapters.values()))[0], modules, parameters, source), indent=2)
    (folder / CONFIG).write_text(text + "\n")
    for path in folder.iterdir():
        path.chmod(READABLE)
    return sorted(trained.adapters.keys() - adapters.keys())


def tensors(trained: Trained) -> list[Row]:
    """Return the tensors of the file, in order."""
    adapters, rows = _expressible(trained), []
    for name, of_weight in adapters.items():
        if not _is_of_expert(name):
            (adapter,) = of_weight  # transformers expects a stack of experts in mlp.experts
            rows += _module_rows(trained, name, adapter)
    for name, of_layer in _experts(adapters).items():
        rows += _expert_rows(trained, name, [of_layer[number] for number in range(len(of_layer))])
    return rows


def _experts(adapters: Adapters) -> dict[str, dict[int, dict[str, Adapter]]]:
    """Return the adapters of experts, by transformers' name of their module, their number and their part."""
    by_module: dict[str, dict[int, dict[str, Adapter]]] = defaultdict(dict)
    for name, of_weight in adapters.items():
        if stack := STACK.match(name):
            for number, adapter in enumerate(of_weight):
                by_module[stack["module"]].setdefault(number, {})[stack["leaf"]] = adapter
        elif match := EXPERT.match(name):
            mlp = match["mlp"].replace("block_sparse_moe", "mlp")  # transformers' name; some releases use another
            of_module = by_module[module(f"{match['layer']}.{mlp}.experts")]
            of_module.setdefault(int(match["number"]), {})[LEAVES[match["leaf"]]] = of_weight[0]
    return by_module


def _expressible(trained: Trained) -> Adapters:
    mtp = released.of_mtp(trained.model)
    return {name: adapter for name, adapter in trained.adapters.items() if name not in mtp}


def _has_experts(trained: Trained) -> bool:
    return any(_is_of_expert(name) for name in trained.model.weights)


def _is_of_expert(name: str) -> bool:
    return bool(EXPERT.match(name) or STACK.match(name))


def _as_parameter(name: str, moe: bool) -> bool:
    return moe and (name.removesuffix(".weight").rpartition(".")[2] in MLP or _is_of_expert(name))


def _module_rows(trained: Trained, name: str, adapter: Adapter) -> list[Row]:
    prefix, rank = PREFIX + module(name), adapter.a.shape[0]
    out, width = adapter.part.shape(trained.model.weights[name].shape)
    rows = [
        Row(f"{prefix}.lora_A.weight", (rank, width), adapter.a.dtype, lambda: trained.change(adapter).a),
        Row(f"{prefix}.lora_B.weight", (out, rank), adapter.b.dtype, lambda: trained.change(adapter).b),
    ]
    if adapter.magnitude:
        magnitudes = lambda: trained.change(adapter).magnitude  # noqa: E731
        rows.append(Row(f"{prefix}.lora_magnitude_vector", (out,), adapter.magnitude.dtype, magnitudes))
    return rows


def _expert_rows(trained: Trained, name: str, experts: list[dict[str, Adapter]]) -> list[Row]:
    rows = []
    for leaf, parts in _leaves(experts[0]).items():
        inner = ".base_layer" if leaf != "down_proj" and "down" in experts[0] else ""
        a, b = experts[0][parts[0]].a, experts[0][parts[0]].b
        rank, width, out, count = a.shape[0], a.shape[1], b.shape[0], len(experts)

        def stack_a(parts=parts) -> torch.Tensor:
            return torch.cat([trained.change(expert[parts[0]]).a for expert in experts])

        def stack_b(parts=parts) -> torch.Tensor:
            whole = [torch.cat([trained.change(expert[part]).b for part in parts]) for expert in experts]
            return torch.stack(whole).permute(1, 2, 0).flatten(1)

        rows.append(Row(f"{PREFIX}{name}{inner}.lora_A.weight", (count * rank, width), a.dtype, stack_a))
        rows.append(Row(f"{PREFIX}{name}{inner}.lora_B.weight", (out, rank * count), b.dtype, stack_b))
    return rows


def _leaves(expert: dict[str, Adapter]) -> dict[str, tuple[str, ...]]:
    """Return transformers' parameters that this expert's adapters change, and the released weights in them."""
    up = {"gate_up_proj": ("gate_up",)} if "gate_up" in expert else {"gate_up_proj": ("gate", "up")}
    leaves = (up if "gate" in expert or "gate_up" in expert else {"up_proj": ("up",)}) | {"down_proj": ("down",)}
    return {leaf: parts for leaf, parts in leaves.items() if parts[0] in expert}


def _shortest(names: set[str], trained: Trained, parts: int) -> list[str]:
    """Return short names that match only these by PEFT's rule (equal, or the end of the full name), else full names.

    A model with vision gets full names, as its vision tower may have modules of the same short names.
    """
    if families.of(trained.model.config).read_as:
        return sorted(names)
    whole = {name for name in trained.model.weights if not _is_of_expert(name)} - released.of_mtp(trained.model).keys()
    whole -= released.copied(trained.model)
    whole = {module(name) + (".weight" if parts > 1 else "") for name in whole}
    short = {_ending(name, parts) for name in names}
    matched = {name for name in whole if any(name.endswith("." + ending) for ending in short)}
    return sorted(short if matched == names else names)


def _ending(name: str, parts: int) -> str:
    """Return the part of a name after the layer's number, or its last component for modules."""
    inside = re.sub(r"^.*\.layers\.\d+\.|^(transformer\.)?h\.\d+\.", "", name)
    return inside if parts > 1 else inside.rpartition(".")[2]


def _config(adapter: Adapter, modules: list[str], parameters: list[str], source: str) -> dict:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": adapter.a.shape[0],
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,  # for inference; PEFT refuses other values with target_parameters
        "target_modules": modules,
        "use_dora": adapter.magnitude is not None,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": adapter.part.turned and adapter.part.expert is None,
        "inference_mode": True,
    }
    return config | ({"target_parameters": parameters} if parameters else {})


def _write_safetensors(path: Path, rows: list[Row]) -> None:
    header, _ = new_safetensors.header(path.name, {row.key: (NAMES[row.dtype], row.shape) for row in rows})
    with path.open("wb") as f:
        f.write(header)
        for row in rows:
            tensor = row.make()
            assert tensor.shape == row.shape, f"{row.key}: {tensor.shape} instead of {row.shape}"
            f.write(as_bytes(tensor))
