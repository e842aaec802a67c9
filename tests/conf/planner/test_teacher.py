"""conf/planner: the teacher of a distillation, which is fetched, converted and asked at the layout of training."""

import pytest

from conf.load import load
from conf.planner import display, hardware, verdict
from conf.planner.hardware import GPUS
from conf.planner.memory import asking, memory
from conf.planner.timing import asking as seconds
from conf.planner.timing import timing
from conf.rules import objectives
from contract.faults import ConfigError

H100 = GPUS["h100"]
KEYS = [
    "hardware.gpu=h100",
    "layout.gpus_per_node=8",
    "data.seq_length=4096",
    "adapter.kind=lora",
    "train.precision=bf16",
]
KEYS += ["evaluate.tasks=[]", "train.global_batch=128", "train.micro_batch=1", "train.teacher_top_k=64"]
DPO = ["hardware.gpu=h100", "data.seq_length=2048", "train.precision=bf16", "evaluate.tasks=[]", "train.micro_batch=1"]
LLAMA = "meta-llama/Llama-3.1-{}-Instruct"


def planned(size: str, *overrides: str, rows: int | None = 10_000) -> verdict.Plan:
    given = [f"model.source={LLAMA.format('8B')}", f"train.teacher={LLAMA.format(size)}", *KEYS, *overrides]
    run = load("tiny-distill", [f"{key}={value}" for key, value in dict(one.split("=", 1) for one in given).items()])
    facts, teacher = verdict.facts_of(run), verdict.teacher_of(run)
    return verdict.plan(verdict.settle(run, facts, H100, teacher), facts, H100, teacher, rows)


def test_a_teacher_that_is_too_large_at_the_layout_of_training_is_refused_with_layouts_that_do():
    refused = planned("70B")
    assert refused.fits and refused.asking and refused.asking.fullest.over > 0
    assert refused.unasked.startswith("train.teacher: meta-llama/Llama-3.1-70B-Instruct: it uses the layout of ")
    lacks = f"lacks {refused.asking.fullest.over / 1e9:.1f} GB on h100. These fit both: layout."
    assert lacks in refused.unasked and "\n" not in refused.unasked
    mends = refused.unasked.partition("These fit both: ")[2].split(", or ")
    assert len(mends) == 2
    for mend in mends:
        again = planned("70B", *mend.split())
        assert again.fits and not again.unasked and again.asking
        assert -again.asking.fullest.over > 0.1 * again.asking.fullest.total


def test_a_teacher_that_no_layout_holds_is_refused_with_what_would_do():
    assert planned("405B").unasked.endswith("fits both; take more or larger GPUs, or a smaller train.teacher")


def test_layout_auto_takes_a_layout_that_does_for_the_teacher_as_well():
    chosen = planned("70B", "layout.auto=true")
    alone = planned("8B", "layout.auto=true")
    assert chosen.fits and not chosen.unasked and chosen.run.layout != alone.run.layout


def test_a_layout_that_cuts_the_teacher_unevenly_is_refused_by_its_key():
    odd = planned("405B", "layout.pp=4", "train.micro_batch=4")
    assert odd.legal and odd.asking is None
    assert odd.unasked.startswith(f"train.teacher: {LLAMA.format('405B')}: layout.pp: 4 ")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.teacher=tiny://gpt2", "train.teacher: tiny://gpt2: a vocabulary of 500 tokens, but the model has 512"),
        ("train.teacher_top_k=513", "train.teacher_top_k: 513, but tiny://glm4-moe has only 512 tokens"),
    ],
)
def test_teachers_that_cannot_teach_are_refused(override, said):
    run = load("tiny-distill", [override])
    facts, cpu = verdict.facts_of(run), hardware.of(run)
    assert verdict.plan(run, facts, cpu, verdict.teacher_of(run)).unasked == said


def test_a_teacher_that_nobody_knows_is_named_by_its_key():
    unknown = load("tiny-distill", ["train.teacher=nobody/knows"])
    with pytest.raises(ConfigError, match=r"^train.teacher: nobody/knows: unknown model; .* as train.teacher or paths"):
        verdict.teacher_of(unknown)


def test_needs_of_the_teacher_stand_beside_those_of_the_model():
    found = planned("70B", "layout.tp=8", "layout.sp=true")
    needs = {need.stage: need for need in found.needs}
    assert [*needs][3:6] == ["download-teacher", "convert-teacher", "reference"]
    assert needs["download-teacher"].disk == needs["convert-teacher"].disk == pytest.approx(141.1e9, rel=1e-3)
    assert found.asking and needs["reference"].gpu_memory == found.asking.fullest.total
    assert needs["reference"].disk == 10_000 * 4096 * 64 * 8  # if every token were learned
    twice = planned("70B", "layout.tp=8", "layout.sp=true", rows=20_000)
    more = {need.stage: need for need in twice.needs}["reference"].seconds
    one = needs["reference"].seconds
    assert one and more and seconds(found.asking.run, found.asking.facts, H100, 10_000) == pytest.approx(more - one)
    unknown = planned("70B", "layout.tp=8", "layout.sp=true", rows=None)
    assert {need.stage: need for need in unknown.needs}["reference"].seconds is None
    said = "\n".join(display.reference(found))
    assert "70.55B parameters, scores about 10,000 rows at the layout of training" in said
    assert display.as_dict(found)["reference"]["model"] == LLAMA.format("70B")


def test_forward_passes_take_less_than_a_step_in_memory_and_time():
    run = load("tiny-dpo", ["model.source=meta-llama/Llama-3.1-8B-Instruct", *DPO])
    facts = verdict.facts_of(run)
    asked = objectives.as_asked(run)
    (one,), (trained,) = asking(asked, facts, H100), memory(run, facts, H100)
    assert one.gradients == one.optimizer == 0
    assert one.weights == trained.weights and one.total < trained.total
    of_step = timing(run, facts, H100).likely
    assert 0.25 < seconds(asked, facts, H100, run.train.global_batch) / of_step < 0.55
    needs = {need.stage: need for need in verdict.plan(run, facts, H100, None, 1000).needs}
    assert needs["reference"].disk == 8000 and "download-teacher" not in needs
