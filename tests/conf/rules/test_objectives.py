"""conf/rules/objectives/: what goes with an objective, said in one line before anything starts."""

import pytest

from conf.load import load
from conf.rules import objectives
from contract.faults import ConfigError

PIPELINE = ["layout.gpus_per_node=2", "layout.pp=2", "moe.dispatcher=allgather"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.packed=true", "train.micro_batch=1"], "data.packed: true, but the two answers of a row are padded"),
        (
            ["data.loss_on=all"],
            "data.loss_on: all, but with two answers to one prompt only the answers count; assistant",
        ),
        (["data.too_long=truncate"], "data.too_long: truncate would cut the two answers' prompts differently; drop"),
        (["data.shape=text"], "data.shape: text, but dpo reads a chosen and a rejected answer; preference"),
        (
            ["reinforce.steps=2", "reinforce.max_tokens=8"],
            "reinforce.steps: 2, but it is not supported after dpo",
        ),
        (
            ["train.ramp_from=16", "train.ramp_sequences=32"],
            "train.ramp_from: 16 is for texts, but dpo reads rows; null",
        ),
        (["model.dropout=0.1"], "model.dropout: 0.1 would make each answer differ from its reference; 0 with dpo"),
        (PIPELINE, "moe.dispatcher: allgather, but stages of a pipeline exchange the sizes of dpo's batches; alltoall"),
        (["train.objective=sft", "train.dpo_beta=0.3"], "train.dpo_beta: has no effect with train.objective sft"),
        (["train.dpo_beta=0"], "train.dpo_beta: "),
        (["train.dpo_label_smoothing=0.5"], "train.dpo_label_smoothing: "),
        (["train.objective=ppo"], "train.objective: "),
    ],
)
def test_what_does_not_go_with_dpo_is_said_beforehand(overrides, said):
    with pytest.raises(ConfigError) as error:
        load("tiny-dpo", overrides)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.teacher=null"], "train.teacher: required with train.objective distill"),
        (["data.packed=true", "train.micro_batch=1"], "data.packed: true, but the rows of distill are padded"),
        (
            ["data.shape=preference"],
            "data.shape: preference, but distill reads rows with one answer; pairs or messages",
        ),
        (["train.dpo_beta=0.3"], "train.dpo_beta: has no effect with train.objective distill"),
        (["train.teacher_top_k=0"], "train.teacher_top_k: "),
        (["train.distill_temperature=0"], "train.distill_temperature: "),
    ],
)
def test_what_does_not_go_with_distillation_is_said_beforehand(overrides, said):
    with pytest.raises(ConfigError) as error:
        load("tiny-distill", overrides)
    assert said in str(error.value)


def test_a_trial_of_made_up_rows_has_as_many_sequences_a_step():
    dpo = load("tiny-dpo", ["train.micro_batch=4"])
    made = objectives.as_sft(dpo).train
    assert (made.objective, made.micro_batch, made.global_batch) == ("sft", 8, 32)
    assert objectives.as_sft(load("tiny")) == load("tiny")


def test_data_of_another_kind_than_the_objective_reads_are_refused():
    dpo, sft = load("tiny-dpo"), load("tiny")
    assert not objectives.unfit(dpo, "data", "preference") and not objectives.unfit(sft, "data", "sft")
    assert objectives.unfit(sft, "data", "preference") == (
        "train.objective: sft reads rows with one answer, or texts, but data contains rows with a chosen and a "
        "rejected answer; use train.objective=dpo"
    )
    assert "; use data.shape=preference, if there are columns chosen and rejected, or " in objectives.unfit(
        dpo, "data", "sft"
    )
    assert objectives.unfit(sft, "data", "pictures").endswith("but data contains data of the kind pictures")
