"""Logits of transformers' model, with PEFT's adapter where there is one: tokens, then a model and adapter per job.

Reads one JSON list of jobs {model, adapter or null, tokens, out}; computes in fp32.
"""

import json
import sys
import warnings


def main() -> None:
    sys.modules["transformer_engine"] = None  # PEFT imports it if it is there; on a CPU only its empty shell is
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for job in json.load(sys.stdin):
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="eager")
        if job["adapter"]:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*(missing|unexpected).*keys.*")
                model = PeftModel.from_pretrained(model, job["adapter"])
        with torch.no_grad():
            torch.save(model.eval()(torch.tensor(job["tokens"])).logits, job["out"])


if __name__ == "__main__":
    main()
