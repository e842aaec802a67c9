"""Whether codes of a merged weight pass the check of trainer/weights/exported/as_released.py: one line of JSON.

python -m tests.support.ranks.merged_codes
"""

import json
from types import SimpleNamespace

import torch

from conf.model_files.quantization import Packed, Scheme
from trainer.rehearsal import meta_model

SIZE = 128


def main() -> None:
    meta_model.prepare()
    answers = {}
    for left in (1e-4, 0.9):
        writer, codes = rounding(left)
        answers[str(left)] = [writer.is_near("w", codes), writer.is_near("w", codes.flip(0))]
    print(json.dumps(answers))


def rounding(left: float):
    """Return the writer of a weight whose adapter leaves this share of each released value, and the new codes."""
    from trainer.weights import low_rank, released_tensors
    from trainer.weights.exported import as_released
    from trainer.weights.quantised import pack, unpack

    packed = Packed(Scheme("fp8", "weight", "weight_scale_inv", (SIZE, SIZE)), (SIZE, SIZE), "w", "s")
    random = torch.Generator().manual_seed(0)
    codes, scales = pack.pack(packed, torch.randn(SIZE, SIZE, generator=random))
    weight = unpack.unpack(packed, codes, scales, torch.bfloat16)
    b = (left - 1) * weight.float()
    change = low_rank.Change(torch.eye(SIZE), b, 1.0, None)
    new_codes, new_scales, _ = pack.change("w", packed, codes, scales, b)
    trained = SimpleNamespace(
        adapters={"w": (None,)}, copies={}, model=SimpleNamespace(packed={"w": packed}), change=lambda adapter: change
    )
    released_tensors.read = lambda model, name: weight
    return as_released.Rounding(trained, scales={"w": new_scales}), new_codes


if __name__ == "__main__":
    main()
