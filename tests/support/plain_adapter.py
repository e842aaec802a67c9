"""A plain training of a LoRA by transformers and PEFT, all rows in each step: the reference for ours.

python -m tests.support.plain_adapter RESOLVED.yaml ADAPTER FOUND.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from conf.load import load
from conf.schema.run import Run
from tests.support.plain_distillation import rows
from tests.support.plain_pretraining import rate
from trainer.startup import device  # noqa: F401

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # in Megatron one layer, which has one A


def tie(model: Any) -> None:
    """Let the released weights that Megatron fuses share their A."""
    for module in model.modules():
        for first, *others in FUSED:
            adapted = hasattr(getattr(module, first, None), "lora_A")
            for other in others if adapted else ():
                getattr(module, other).lora_A = getattr(module, first).lora_A


def train(run: Run, adapter: str) -> dict[str, list[float]]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    released = AutoModelForCausalLM.from_pretrained(
        run.paths.model, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    model: Any = PeftModel.from_pretrained(released, adapter, is_trainable=True)
    tie(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    one, batch = run.optimizer, rows(run)
    optimizer = torch.optim.AdamW(
        trained, lr=one.lr, betas=(one.beta1, one.beta2), eps=one.eps, weight_decay=one.weight_decay
    )
    losses, norms = [], []
    for step in range(run.train.steps or 0):
        for group in optimizer.param_groups:
            group["lr"] = rate(run, step)
        logits = model(batch["tokens"]).logits
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        loss = (each * batch["loss_mask"].flatten()).sum() / batch["loss_mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, one.clip_grad).item())
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms}


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(train(load(sys.argv[1]), sys.argv[2])))
