"""Train on what a packed base stands for, as ordinary weights: one process, by the formats' own code.

The weights are packed and unpacked whole by trainer/weights/quantised, which is held against transformers,
compressed-tensors and ModelOpt, where model.base packs a rank's part of them as it is loaded.
"""

import json
import re
from pathlib import Path

import torch
from megatron.bridge.training import setup
from megatron.core.utils import unwrap_model

from conf.model_files.quantization import Packed, Scheme
from conf.rules.packed_base import is_packed
from conf.schema.run import Run
from tests.support import e2m1 as by_definition
from trainer import train
from trainer.weights.quantised import e2m1, pack, unpack

SCHEMES = {"fp8": Scheme("fp8", "", "", (128, 128)), "int4": Scheme("int", "", "", (1, 32), 4)}
MATRIX = re.compile(r"\.(linear\w*|(eh|in|out|fc\d_latent)_proj)\.weight\d*$")
SCALES = {"fp8": torch.float32, "int4": torch.bfloat16}


def main(run: Run) -> None:
    request = json.loads((Path(run.paths.output) / "request.json").read_text())
    base, pack = request["base"], request.get("pack")
    chosen = run.model_copy(update={"model": run.model.model_copy(update={"pack": pack and tuple(pack)})})
    usual = setup._load_checkpoint_from_path

    def load(*args, model, **kwargs):
        found = usual(*args, model=model, **kwargs)
        for chunk in unwrap_model(model):
            for name, parameter in chunk.named_parameters():
                if MATRIX.search(name) and is_packed(chosen, name):
                    parts = parameter.data.chunk(2 if "linear_fc1" in name and chunk.config.gated_linear_unit else 1)
                    if ".in_proj." in name:
                        net = chunk.get_submodule(name.partition(".in_proj.")[0])
                        parts = parameter.data.split([*net.in_proj_split_sections])
                    largest = parameter.data.float().abs().amax()  # gate and up share a factor
                    parameter.data = torch.cat([rounded(base, part, largest) for part in parts])
        return found

    setup._load_checkpoint_from_path = load
    train.main(run)


def rounded(base: str, weight: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    if base == "nvfp4":
        return by_definition.weight(*e2m1.nvfp4(weight, largest)).to(weight.dtype)
    if base == "mxfp4":
        return by_definition.weight(*e2m1.mxfp4(weight)).to(weight.dtype)
    packed = Packed(SCHEMES[base], tuple(weight.shape), "", "")
    codes, scales = pack.pack(packed, weight, SCALES[base])
    return unpack.unpack(packed, codes, scales, weight.dtype)
