"""Logits of transformers' models in fp32, with a PEFT adapter where one is given.

The input is one JSON list of jobs, each with model, adapter (or null), tokens and out. With `draw`, the model is made
first, of the config.json in its folder, and every tensor of it is drawn at random.
"""

import json
import sys
import warnings
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))


def main() -> None:
    import torch
    import transformers

    from trainer.patches.families import kimi_k2, minimax_m2, nemotron_h

    kimi_k2.install()
    minimax_m2.install()
    nemotron_h.install()
    for job in json.load(sys.stdin):
        config = transformers.AutoConfig.from_pretrained(job["model"])
        kind = getattr(transformers, config.architectures[0])
        if job.get("draw"):
            fp32 = {"dtype": torch.float32, "attn_implementation": "eager"}
            model = transformers.AutoModelForCausalLM.from_config(config, **fp32)
            draw(model)
            model.save_pretrained(f"{job['model']}/weights")
        else:
            model = kind.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="eager")
        if job["adapter"]:
            from peft import PeftModel  # seconds, that most callers do without
            from peft.tuners.tuners_utils import BaseTuner

            BaseTuner._check_target_module_compatiblity = lambda *_: None  # refuses out_proj: kernels bypass it
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*(missing|unexpected).*keys.*")
                model = PeftModel.from_pretrained(model, job["adapter"])
        with torch.no_grad():
            torch.save(model.eval()(torch.tensor(job["tokens"])).logits, job["out"])


def draw(model) -> None:
    """Draw norms around 1, biases around 0, all else with a spread that gives logits of about 1 at a width of 128."""
    import torch

    unscaled = any(getattr(module, "scaling", 0) == 1 for module in model.modules())
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("inv_freq", "embed_scale")):
                continue
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            if "norm" in name:
                # without a factor of scores, keys of this size keep attention from taking one token only
                small = name.endswith("k_norm.weight") and unscaled
                tensor.copy_((0.2 if small else 1) + (0.04 if small else 0.2) * noise)
            else:
                tensor.copy_((0.2 if name.endswith("bias") else 0.08) * noise)


if __name__ == "__main__":
    main()
