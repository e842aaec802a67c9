"""Packs of a micro batch that are joined to one row: the losses and gradients of the same packs one by one."""

import pytest
import torch

from trainer.patches.joined_packs import joined

BOUND = 1e-4  # as in test_gradients.py; most are below 1e-6, and small sums of delta nets up to 8e-5
DENSE, EXPERTS, DELTA, MAMBA = "llama", "glm4-moe-mtp", "qwen3-5", "nemotron-h"
VPP = "layout.pp=2 layout.vpp=2"
CUTS = ("alone", "layout.pp=2", "layout.cp=2", "layout.tp=2 layout.sp=true")
QUICK = [(EXPERTS, VPP), (DELTA, "layout.cp=2"), (MAMBA, "alone")]
SLOW = [(kind, cut) for kind in (DENSE, EXPERTS, DELTA, MAMBA) for cut in CUTS if (kind, cut) not in QUICK]


@pytest.mark.parametrize("kind, cut", [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_joined_packs_have_the_losses_and_gradients_of_packs_one_by_one(kind, cut, compare):
    found = compare(kind, "none", cut, True, both=("train.global_batch=8",), settings=("train.micro_batch=4",))
    assert found["gradient"]["difference"] <= BOUND, found["gradient"]
    assert found["loss"] <= (4e-6 if kind == DELTA else 2e-6) and found["same_routes"], found


def test_rows_end_in_joined_packs_where_they_ended_apart():
    places = torch.arange(16).view(4, 4)
    ends, padded = torch.tensor([[0, 1, 3, 3], [0, 2, 2, 2]]), torch.tensor([[0, 2, 4, 4], [0, 4, 4, 4]])
    batch = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), places)
    batch |= {"cu_seqlens_q": ends.repeat(2, 1), "cu_seqlens_q_padded": padded.repeat(2, 1), "attention_mask": None}
    batch |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), torch.tensor([[2], [4], [2], [4]]))
    found = joined(batch, 2)
    assert found["tokens"].tolist() == [[*range(8)], [*range(8, 16)]]
    assert found["cu_seqlens_q"].tolist() == [[0, 1, 3, 5, 5, 5, 5]] * 2
    assert found["cu_seqlens_q_padded"].tolist() == [[0, 2, 4, 8, 8, 8, 8]] * 2
    assert found["max_seqlen_q"].tolist() == [[4], [4]] and found["attention_mask"] is None


def test_a_resume_of_joined_packs_continues_bitwise_with_the_same_validations(configure, ranks, base, work):
    base(DENSE)
    keys = ["data.packed=true", "train.micro_batch=2", "train.global_batch=2", "train.steps=4"]
    keys += ["checkpoint.save_every=2", "train.validate_every=2", "train.validate_batches=1"]
    keys += ["layout.gpus_per_node=2", "layout.pp=2"]
    whole = ranks("train", configure(DENSE, f"paths.output={work}/joined", *keys))
    cut = configure(DENSE, f"paths.output={work}/joined-killed", *keys)
    assert ranks("train", cut, kill_at=3).code == -9
    resumed = ranks("train", cut)
    assert whole.code == resumed.code == 0, whole.output + resumed.output
    found, expected = (
        [(line["kind"], line["step"], line["lm_loss"]) for line in one.metrics if "lm_loss" in line]
        for one in (resumed, whole)
    )
    assert found == expected and [step for kind, step, _ in found if kind == "train"] == [1, 2, 3, 4]
