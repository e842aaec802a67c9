"""conf/schema/bearing.py, conf/schema/identity.py: each key decides what it bears on, and artifacts are found again."""

import json
from collections import namedtuple
from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter

from conf import families
from conf.load import load
from conf.planner import verdict
from conf.rules import reinforcement
from conf.schema import bearing, identity
from conf.schema.bearing import NOWHERE, bears
from conf.schema.data import Part
from conf.schema.run import Run, sections
from conf.schema.sections import Section
from conf.schema.training import Train
from contract.faults import ConfigError
from flows.pipeline import PIPELINE
from tasks.sources import adapters, hub, released_config, row_sources

# Fingerprints of all stages, in order, as of version 4906b5a: an edit that changes one throws away what others have
# paid for. Those of adapters that experts share are younger where ep > 1: they were another model at each ep. Those of
# trainings that balance experts, or have MTP layers, are younger too: conf/rules/auxiliary_losses.py.
MADE = [
    (
        "tiny",
        "",
        "ecdb0cbcb551ad59 a3610b4f3664e50c 704e7c13c8a768c4 c39aba8db4f7c34e "
        "24a1790a70e5b661 4e132a0f4a81c552 363119f708031604 bd7b7630f4c6b5c1",
    ),
    (
        "glm47",
        "",
        "6fd97773102422f4 3b96f3784513004a ac712979fccde627 6eecf0d6371fba40 "
        "5cec6da2feb22411 e55f4ed11b8875cf fc6f26d73fcbff82 a24dfc7d3a861c60",
    ),
    (
        "glm47",
        "adapter.experts=each",
        "6fd97773102422f4 3b96f3784513004a ac712979fccde627 6eecf0d6371fba40 "
        "c3a8084d86438e82 60ab659790318133 f56fde1c2bac5126 c4e5cbbbebeecaa1",
    ),
    (
        "tiny",
        "model.source=tiny://dense adapter.kind=none evaluate.precision=bf16",
        "2860f56845d3316e f8310ed52f17506c c820995b733e7d54 37fa7c2f693b9b03 "
        "33d8f0c3d46b6f4b 0fb42ac4934cc775 65042ba8b55e3d44 8b2ceeb4a543ed74",
    ),
    (
        "tiny",
        "adapter.experts=shared train.stop_after=3 data.packed=true data.input=question train.micro_batch=1",
        "ecdb0cbcb551ad59 46516345a32d4f51 704e7c13c8a768c4 53372a9f8a8b7fa6 "
        "79a76fb89a13430c 1cbfda25b4540c9e a52bc1093559560e 444474e5c18524af",
    ),
    (
        "glm47",
        "train.fp8=current optimizer.states=bf16 optimizer.gradients=bf16 adapter.kind=none",
        "6fd97773102422f4 3b96f3784513004a ac712979fccde627 6eecf0d6371fba40 "
        "fada29e3fc23f431 7a8d53e384cd4018 c496825579527585 f9291f7506bee958",
    ),
    (
        "glm47",
        "adapter.experts=each model.revision=v2 model.unsafe_weights=true data.split=test data.rows=9 "
        "export.formats=[merged] evaluate.rows=null promote.margin=0.1 moe.balance=none",
        "9ed884aad601057d b0e673f03b63403e 019b05f7fd1169a7 ba1d3daf20c562b5 "
        "cda847b5e62f09cd 057c62fe0f9b0ef0 e3f886b38392463b 6114a14aff34f412",
    ),
    (
        "glm47",
        "moe.balance=none model.mtp=false",
        "6fd97773102422f4 3b96f3784513004a 6827d10a877ddd1a 6eecf0d6371fba40 "
        "ac123039b21da6e0 0b7d01934450390a 23690a75a305230b 67edb0ef47988293",
    ),
    (
        "glm47",
        "optimizer.distributed=false log.every=7 gang.retries=9 evaluate.gpus=2 paths.model=elsewhere data.workers=3",
        "6fd97773102422f4 3b96f3784513004a ac712979fccde627 6eecf0d6371fba40 "
        "5cec6da2feb22411 e55f4ed11b8875cf fc6f26d73fcbff82 a24dfc7d3a861c60",
    ),
]
KEYS = {f"{section}.{key}": field for section, kind in sections().items() for key, field in kind.model_fields.items()}
PINNED = {key: bearing.of(field).absent for key, field in KEYS.items() if bearing.of(field).pinned}


def described(run: Run) -> dict[str, Any]:
    """The config.json of the model, by whatever name other() gives it; nothing of one that is unknown."""
    source = str(run.model.source).removesuffix("-other")
    try:
        return verdict.config_of(run.model_copy(update={"model": run.model.model_copy(update={"source": source})}))[0]
    except ConfigError:
        return {}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    """Each source is at a commit of its name and revision."""
    resolved = namedtuple("resolved", "commit")
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path))
    monkeypatch.setattr(hub, "resolve", lambda source, revision: resolved(f"commit of {source} at {revision}"))
    monkeypatch.setattr(released_config, "read", described)
    monkeypatch.setattr(families, "digest", lambda place: f"content of {place}")
    monkeypatch.setattr(adapters, "identity", lambda source, *_: f"content of {source}")
    monkeypatch.setattr(reinforcement, "_content", lambda key, place: f"content of {place}")
    monkeypatch.setattr(row_sources, "_commit", lambda source, revision, _: f"commit of {source} at {revision}")


@pytest.mark.parametrize(("conf", "overrides", "made"), MADE)
def test_what_was_made_before_is_found_again(conf, overrides, made):
    stages = PIPELINE.stages(load(conf, [*overrides.split(), "promote.confidence=0"]))  # all were decided without it
    assert {name: stage.fingerprint for name, stage in stages.items()} == dict(zip(stages, made.split(), strict=True))


def other(value: Any) -> Any:
    match value:
        case None:
            return "other"
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}-other"
    return type(value)() if value else (Part(source="org/other"),)


def with_other(run: Run, key: str) -> Run:
    section, _, name = key.partition(".")
    values = getattr(run, section)
    value = "pairs" if key == "data.shape" else other(getattr(values, name))
    return run.model_copy(update={section: values.model_copy(update={name: value})})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # other values need not be legal here
def test_a_value_counts_in_the_stages_that_its_key_declares_and_in_no_other():
    taught = ["train.objective=distill", "train.teacher=org/teacher"]
    run = load("glm47", ["layout.nodes=1", "layout.cp=1", "reinforce.steps=3", *taught], illegal=True)
    made = {name: stage.config for name, stage in PIPELINE.stages(run).items()}
    wrong = {}
    for key, field in KEYS.items():
        declared = bearing.of(field)
        counts = {"prepare" if stage == "source" else stage for stage in declared.stages}
        stages = PIPELINE.stages(with_other(run, key)).items()
        found = {stage.name for name, stage in stages if stage.config != made[name if name in made else stage.name]}
        if not counts <= found <= counts | {declared.derived}:
            wrong[key] = found
    assert wrong == {}


@pytest.mark.parametrize("best, changed", [("true", ["train", "export", "evaluate-tuned", "promote"]), ("false", [])])
def test_how_often_is_saved_counts_for_the_best_checkpoint_alone(best, changed):
    shared = [f"checkpoint.keep_best={best}", "train.validate_every=5"]
    often, seldom = (PIPELINE.stages(load("tiny", [*shared, f"checkpoint.save_every={n}"])) for n in (5, 20))
    assert [name for name in often if often[name].fingerprint != seldom[name].fingerprint] == changed


def test_an_adapter_that_is_served_unmerged_is_another_evaluation_of_the_tuned_model_alone():
    made = PIPELINE.stages(load("glm47"))
    found = PIPELINE.stages(load("glm47", ["evaluate.adapter=unmerged"]))
    changed = [name for name in made if found[name].fingerprint != made[name].fingerprint]
    assert changed == ["evaluate-tuned", "promote"]


def test_a_key_that_declares_nothing_is_refused():
    with pytest.raises(TypeError, match=r"^Toy\.second: has no declaration of identity"):

        class Toy(Section):
            first: Annotated[int, NOWHERE] = Field(default=1, description="declared")
            second: int = Field(default=1, description="not declared")


class Toy(Section):
    """A section whose last two keys came when there were artifacts."""

    rank: Annotated[int, bears("train", "export")] = 8
    every: Annotated[int, NOWHERE] = 1
    scaled: Annotated[str | None, bears("train", absent=None)] = None
    sizes: Annotated[tuple[int, ...], bears("train", absent=[1])] = (2,)


def test_what_was_made_before_a_key_came_is_what_its_absence_means_and_not_its_default():
    before = {"rank": 8}
    assert identity.of_section(Toy(sizes=(1,)), "train") == before
    assert identity.of_section(Toy(), "train") == before | {"sizes": [2]}
    assert identity.of_section(Toy(scaled="rows"), "train") == before | {"scaled": "rows", "sizes": [2]}
    assert identity.of_section(Toy(), "export") == before
    assert identity.of_section(Toy(), "evaluate") == {}


def test_a_default_that_changes_changes_nothing_of_what_there_is(monkeypatch):
    run = load("tiny")
    made, record = identity.of(run, "train"), {"train.steps": 30}
    explicit = run.model_copy(update={"train": run.train.model_copy(update={"fp8": "current"})})
    monkeypatch.setattr(Train.model_fields["fp8"], "default", "current")
    assert identity.of(run, "train") == made
    assert identity.of(explicit, "train")["train"] == made["train"] | {"fp8": "current"}
    assert identity.completed(record)["train.fp8"] is None


def test_absence_means_a_value_that_the_key_may_have():
    for key, absent in PINNED.items():
        kind = Annotated[KEYS[key].annotation, *KEYS[key].metadata]  # pyright: ignore[reportInvalidTypeForm]
        assert TypeAdapter(kind).validate_json(json.dumps(absent)) == absent, key


def test_a_resume_may_change_what_bears_on_no_step_and_not_what_megatron_cannot_read():
    declared = {key: bearing.of(field) for key, field in KEYS.items()}
    free = {key for key, one in declared.items() if "train" in one.stages and not one.held}
    assert free == {
        *("train.validate_every", "train.validate_batches", "train.stop_after", "train.stop_after_worse"),
        *("checkpoint.keep", "checkpoint.keep_best", "evaluate.parity_rows", "moe.grouped_gemm"),
    }
    held = {key for key, one in declared.items() if "train" not in one.stages and one.held}
    assert held == {"optimizer.distributed", "optimizer.offload", "train.teacher"}
