"""A plain distillation by transformers and torch, all rows in each step: what ours is held to.

python -m tests.support.plain_distillation RESOLVED.yaml FOUND.json
"""

# pyright: reportOptionalMemberAccess=false

import json
import sys
from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet

from conf.load import load
from conf.schema.run import Run
from tests.support.plain_pretraining import rate
from trainer.data import prepared
from trainer.startup import device  # noqa: F401


def divergence(student: torch.Tensor, teacher: torch.Tensor, k: int) -> torch.Tensor:
    """KL over the teacher's k likeliest tokens, and all others as one class."""
    said, ids = teacher.log_softmax(-1).topk(k)
    classes = [
        torch.cat([one, (1 - one.exp().sum(-1, keepdim=True)).log()], -1)
        for one in (said, student.log_softmax(-1).gather(-1, ids))
    ]
    return torch.nn.functional.kl_div(classes[1], classes[0], reduction="none", log_target=True).sum(-1)


def rows(run: Run) -> dict[str, torch.Tensor]:
    """All rows that are trained on, as one batch."""
    table = parquet.read_table(prepared.folder(run) / "training.idx.parquet").to_pylist()
    shape = len(table), run.data.seq_length
    batch = {key: torch.zeros(shape, dtype=torch.long) for key in ("tokens", "labels", "loss_mask")}
    for number, row in enumerate(table):
        length = len(row["input_ids"]) - 1
        batch["tokens"][number, :length] = torch.tensor(row["input_ids"][:-1])
        batch["labels"][number, :length] = torch.tensor(row["input_ids"][1:])
        batch["loss_mask"][number, :length] = torch.tensor(row["loss_mask"][:-1])
    return batch


def train(run: Run) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        for folder in (run.paths.model, run.paths.teacher)
    )
    batch = rows(run)
    one, mask, temperature = run.optimizer, batch["loss_mask"], run.train.distill_temperature
    groups = [
        {"params": [p for p in student.parameters() if p.ndim > 1], "weight_decay": one.weight_decay},
        {"params": [p for p in student.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=one.lr, betas=(one.beta1, one.beta2), eps=one.eps)
    with torch.no_grad():
        said = teacher(batch["tokens"]).logits / temperature
    losses = []
    for step in range(run.train.steps or 0):
        for group in optimizer.param_groups:
            group["lr"] = rate(run, step)
        found = divergence(student(batch["tokens"]).logits / temperature, said, run.train.teacher_top_k)
        loss = temperature**2 * (found * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), one.clip_grad)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(train(load(sys.argv[1]))))
