"""Logits of transformers' models in fp32, with a PEFT adapter where one is given. Started by test_export.py.

Reads one JSON list of jobs, each with model, adapter (or null), tokens and out.
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
