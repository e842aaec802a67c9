"""A plain training by transformers and torch on the sequences that megatron-core gives: what ours is held to.

python -m tests.support.plain_pretraining RESOLVED.json LOSSES.json
"""

# pyright: reportOptionalOperand=false, reportOperatorIssue=false

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from conf.load import load
from conf.schema.run import Run
from trainer.startup import device  # noqa: F401


def sequences(run: Run) -> tuple[Any, Any]:
    """Sequences of training, in core's order, and those that its validations take from."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        eod, vocab_size, unique_identifiers = 0, 512, {}

    prefixes = [([str(Path(run.paths.data) / split)], None) for split in ("training", "validation")]
    flags = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    config = GPTDatasetConfig(
        random_seed=run.data.seed,
        sequence_length=run.data.seq_length,
        blend_per_split=[*prefixes, None],
        tokenizer=Tokenizer(),
        **flags,
    )
    batch, train = run.train.global_batch, run.train
    validations = train.steps // train.validate_every + 1  # as many as Bridge counts
    sizes = [train.steps * batch, validations * train.validate_batches * batch, 0]
    training, validation, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return training, validation


def validation_order(run: Run, rows: Any) -> list[int]:
    """Rows of all validations, one after another, as Bridge's MegatronPretrainingRandomSampler has them on one rank."""
    whole = len(rows) // run.train.micro_batch * run.train.micro_batch
    return torch.randperm(whole, generator=torch.Generator().manual_seed(0)).tolist()


def rate(run: Run, step: int) -> float:
    """Megatron's learning rate of a step, the first being 0."""
    one, warmup = run.optimizer, run.optimizer.warmup_steps
    if warmup and step <= warmup:
        return one.lr * step / warmup
    if one.decay == "constant":
        return one.lr
    share = (step - warmup) / (run.train.steps - warmup)
    return one.min_lr + (one.lr - one.min_lr) * 0.5 * (math.cos(math.pi * share) + 1)


def loss_of(model: Any, rows: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the tokens, and the mean square of the logarithm of the softmax's sum."""
    logits = model(torch.stack([row["tokens"] for row in rows])).logits
    labels = torch.stack([row["labels"] for row in rows])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss, logits.logsumexp(-1).square().mean()


def train(run: Run) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(run.paths.model, dtype=torch.float32, attn_implementation="eager")
    training, validation = sequences(run)
    order, each = validation_order(run, validation), run.train.validate_batches * run.train.global_batch
    one, batch = run.optimizer, run.train.global_batch
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": one.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=one.lr, betas=(one.beta1, one.beta2), eps=one.eps)
    losses, validations = [], []
    for step in range(run.train.steps or 0):
        for group in optimizer.param_groups:
            group["lr"] = rate(run, step)
        loss, squares = loss_of(model, [training[step * batch + row] for row in range(batch)])
        optimizer.zero_grad()
        (loss + run.train.z_loss * squares).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), one.clip_grad)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % int(run.train.validate_every) == 0:
            taken, order = order[:each], order[each:]
            with torch.no_grad():
                found = [loss_of(model, [validation[row]])[0].item() for row in taken]
            validations.append(sum(found) / each)
    return {"losses": losses, "validations": validations}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(train(load(sys.argv[1]))))
