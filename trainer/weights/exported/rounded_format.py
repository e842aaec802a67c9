"""Writer of the merged model in 8 or 4 bits: export.quantization=fp8, int4, nvfp4 or mxfp4, for any release.

Each matrix of a layer is merged in fp32 and rounded once, to the nearest code of its block (conf/rules/packed_base.py
has the formats). file_format.py has names and config.json. In nvfp4, matrices that vLLM joins share a factor.
Embeddings, norms, routers, biases and the output layer are as in a merged model. So are matrices whose rows have no
whole groups in 4 bits, and those for which vLLM has no codes. Each value must be within half a step of a second
computation from the adapter's factors.
"""

# pyright: reportArgumentType=false

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from conf import families, model_facts
from conf.rules.packed_base import FORMATS, Format
from conf.schema.run import Run
from contract.faults import Fault
from trainer.megatron.packed_base import codes as of_codes
from trainer.weights import low_rank, released
from trainer.weights.exported import file_format
from trainer.weights.exported.packed_format import Codes
from trainer.weights.exported.parts import Merged
from trainer.weights.packed_base import packing
from trainer.weights.packed_base.part import Found, unpacked
from trainer.weights.quantised import pack
from trainer.weights.trained import Trained

# Half a step between codes, as a share of the value and as a share of the scale: the larger one counts.
HALF = {"fp8": (2.0**-4, 2.0**-10), "int": (0.0, 0.5), "nvfp4": (0.2, 0.25), "mxfp4": (0.2, 0.25)}
# Matrices that vLLM joins, by the last part of their names.
JOINED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv") | dict.fromkeys(
    ("gate_proj", "up_proj", "w1", "w3"), "fc1"
)
JOINED |= dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "qkv_a") | dict.fromkeys(
    ("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"
)


@dataclass
class Rounded(Codes):
    """Codes and scales of the merged matrices, and the losses of rounding."""

    matrices: Collection[str] = ()
    of: Format = FORMATS["fp8"]
    losses: dict[str, pack.Loss] = field(default_factory=dict)
    joined: dict[str, list[str]] = field(default_factory=dict)
    tops: dict[str, torch.Tensor] = field(default_factory=dict)  # largest values of joined matrices

    @property
    def form(self) -> Format:
        return self.of

    def has(self, weight: str) -> bool:
        return weight in self.matrices

    def is_right(self, path, name: str, entry: released.Entry, written: str) -> bool:
        weight = self.weight(name)
        if not self.has(weight):
            return Merged.is_right(self, path, name, entry, written)
        if not released.has_sum(path, entry, written):
            return False
        return weight in self.trained.values or self.trained.is_released(weight)

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the rounding losses of these tensors' weights."""
        weights = {self.weight(name) for name in names}
        return {"losses": {name: asdict(self.losses[name]) for name in sorted(weights & self.losses.keys())}}

    def codes(self, name: str) -> Found:
        exact = self.trained.exact(name)
        found = packing.of_matrix(self.form, exact, self._top(name))
        numbers = unpacked(found, self.form.block)
        if not is_near(self.form, found, numbers, expected(self.trained, name)):
            raise Fault(f"export.quantization: {name}: its codes are not those of the merged weight")
        weight, error = exact.square().sum(), (numbers - exact).square().sum()
        self.losses[name] = pack.Loss(float(weight), float(error))
        return found

    def _top(self, name: str) -> torch.Tensor | None:
        """Return the largest value of the matrices that share a factor with this one; None without factors."""
        if not self.form.factor_bytes:
            return None
        joined = _joined(name)
        if joined not in self.tops:
            largest = [self.trained.exact(one).abs().amax() for one in self.joined[joined]]
            self.tops[joined] = torch.stack(largest).amax()
        return self.tops[joined]


def _joined(name: str) -> str:
    """Return a common name of the matrices that vLLM joins."""
    module, _, leaf = name.removesuffix(".weight").rpartition(".")
    return f"{module}.{JOINED.get(leaf) or leaf}"


def is_near(form: Format, found: Found, numbers: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether the values of the codes are within half a step of the exact weight."""
    _, scales, factor = found
    (height, width), (rows, columns) = form.block, exact.shape
    spread = of_codes.in_fp32(scales) * (1 if factor is None else factor)
    spread = spread.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    of_value, of_scale = HALF[form.kind]
    bound = torch.maximum(exact.abs() * of_value, spread * of_scale) * 1.001 + 1e-5 * exact.abs().max()
    return bool(((numbers - exact).abs() <= bound).all())


def expected(trained: Trained, name: str) -> torch.Tensor:
    """Return the weight in fp32, merged in another order of computation."""
    if not (adapters := trained.adapters.get(name)):
        return trained.exact(name)
    change = trained.change(adapters[0])
    before = trained.before(adapters[0].part).to(torch.float32, copy=True)
    return low_rank.expected(before, change.a.float(), change.b.float() * change.scale, change.magnitude)


def open_rounded(run: Run, trained: Trained) -> Rounded:
    """Return the contents of the files of a merged model in 8 or 4 bits."""
    model, form = trained.model, FORMATS[run.export.quantization or ""]
    tensors = families.of(model.config).tensors(model_facts.facts_from_hf(model.config), model.weights)
    matrices = {name: tensor for name, tensor in tensors.items() if tensor.matrix and name in model.weights}
    if stacks := [name for name, tensor in matrices.items() if tensor.stacked or tensor.turned]:
        text = f"the release stores these in other shapes: {released.enumerate_names(sorted(stacks))}"
        raise Fault(f"export.quantization: {run.export.quantization}, but {text}; null")
    groups = form.block[1] if form.bits == 4 else 1
    whole = {name for name in matrices if model.weights[name].shape[1] % groups == 0}
    whole -= {*filter(file_format.IN_BF16.fullmatch, whole)}
    kept, joined = whole - trained.copies.keys() - released.copied(model), defaultdict(list)
    for name in sorted(kept):
        joined[_joined(name)].append(name)
    return Rounded(trained, matrices=kept, of=form, joined=joined)
