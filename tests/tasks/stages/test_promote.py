"""tasks/stages/promote.py against MLflow's own registry in a sqlite file: who is challenger, who champion, and why."""

import json
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.load import load
from contract.faults import Fault
from tasks.run import artifact
from tasks.run.artifact import Stage
from tasks.stages import promote
from tasks.stages.promote import Rival, decide
from tasks.store import open_store

METRIC = "held_out/exact_match"
ROWS = 100


@pytest.mark.parametrize(
    "value, rival, margin, wins, says",
    [
        (0.8, 0.5, 0.0, True, "held_out/exact_match 0.8 against 0.5 of X: +0.3, above the margin of 0"),
        (0.5, 0.5, 0.0, False, "held_out/exact_match 0.5 against 0.5 of X: +0, not above the margin of 0"),
        (0.4, 0.5, 0.0, False, "-0.1, not above"),
        (0.4, 0.3, 0.1, False, "+0.1, not above the margin of 0.1"),  # 0.4 - 0.3 is 0.10000000000000003
        (0.41, 0.3, 0.1, True, "above the margin of 0.1"),
        (-2.0, -3.0, 0.5, True, "+1, above"),  # log-likelihoods
        (0.9, None, 0.0, False, "X was never measured by held_out/exact_match"),
        (float("nan"), 0.1, 0.0, False, "cannot be compared"),
        (0.9, float("nan"), 0.0, False, "not above"),
    ],
)
def test_decisions(value, rival, margin, wins, says):
    decision, reason = decide(METRIC, value, [Rival("X", rival)], margin)
    assert (decision, says in reason) == (wins, True), reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rival", [None, Rival("X", None), Rival("X", 0.5), Rival("X", float("-inf"))])
@pytest.mark.parametrize("metric", [METRIC, "held_out/perplexity"])
def test_what_is_no_number_is_better_than_nothing(value, rival, metric):
    wins, reason = decide(metric, value, [rival] if rival else [], 0.0)
    assert not wins and f"{value}" in reason, reason


def scores(metric: str, value: float) -> dict[str, list[list[float]]]:
    """Scores of ROWS rows: the first ones are right, or each token has the same log-probability."""
    if metric.endswith("perplexity"):
        return {metric: [[-7 * math.log(value), 7]] * ROWS}
    return {metric: [[float(row < round(value * ROWS)), 1] for row in range(ROWS)]}


@dataclass
class Toy:
    """As much of the stage's run as promotion asks for."""

    run: object
    asked: Stage
    store: object
    tracking: SimpleNamespace
    work: Path
    said: list = field(default_factory=list)

    def get_or_make(self, make, valid):
        """tasks/run/session.py's, less Prefect and tracking."""
        found = artifact.find(self.asked, self.store)
        make_again = isinstance(found, artifact.Artifact) and not valid(found)
        return artifact.get_or_make(
            self.asked, self.store, make, self.work, self.said.append, {"flow": "toy"}, make_again
        )


def tracked(uri: str) -> SimpleNamespace:
    """As much of its tracking."""
    return SimpleNamespace(uri=uri, name="brisk", prefect="http://prefect/runs/7", training_run=lambda: None)


@pytest.fixture(scope="module")
def empty_registry(tmp_path_factory):
    """Migrating a new database takes seconds: once for all tests."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    logging.getLogger("alembic").setLevel(logging.WARNING)
    promote.registry(f"sqlite:///{path}").search_registered_models()
    return path.read_bytes()


@pytest.fixture
def world(tmp_path, empty_registry):
    """Promotes what a run of this name, seed and score made."""
    database = tmp_path / "mlflow.db"
    database.write_bytes(empty_registry)
    store = open_store(str(tmp_path / "store"))

    def made(stage: Stage, result: dict, scores: dict | None = None):
        def make(work):
            (work.folder / "files/model").write_text(stage.fingerprint)
            if scores:
                (work.folder / "files/scores.json").write_text(json.dumps(scores))
            return result

        return artifact.get_or_make(stage, store, make, tmp_path / "work", lambda _: None, {"flow": "toy"})

    def held_out(test: str = "rows", training: str = "others", count: int = 49, kind: str = "sft", length: int = 64):
        def make(work):
            (work.folder / "files/test.jsonl").write_text(test)
            (work.folder / "files/training.jsonl").write_text(training)
            return {"kind": kind, "rows": {"test": count}}

        of = {"test": test, "training": training, "count": count, "kind": kind, "seq_length": length}
        stage = Stage("prepare", 1, of, {"model": "m"})
        return artifact.get_or_make(stage, store, make, tmp_path / "work", lambda _: None, {"flow": "toy"})

    def models(seed: int, score: float, base: float = 0.05, metric: str = METRIC, data=None, **asked):
        stage = Stage("export", 1, {"seed": seed})
        tuned = made(stage, {"uri": store.link(f"{stage.key}/files/merged")})
        of_base = {"of": "base", "score": base, "metric": metric}
        before = made(Stage("evaluate", 1, of_base), {"metrics": {metric: base}}, scores(metric, base))
        after = made(
            Stage(
                "evaluate",
                1,
                {"seed": seed, "score": score, "metric": metric, "evaluate": asked},
                inputs={"data": (data or held_out()).stage.fingerprint},
            ),
            {"metrics": {metric: score, "arc/acc": 0.3}},
            scores(metric, score),
        )
        return tuned, before, after

    def scored(base: dict, tuned: dict, seed: int = 1):
        """Evaluations by the scores of their rows, or by their metrics alone."""
        exported, *_ = models(seed, 0.0)
        found = []
        for of, one in (("base", base), ("tuned", tuned)):
            (name, rows), *_ = one.items()
            known = one if isinstance(rows, float) else {name: sum(value for value, _ in rows) / len(rows)}
            stage = Stage("evaluate", 1, {"of": of, "rows": str(one)}, {"data": held_out().stage.fingerprint})
            found.append(made(stage, {"metrics": known}, None if isinstance(rows, float) else one))
        return exported, *found

    def run(seed: int, score: float, *overrides: str, found=None, released=None, **more):
        tuned, before, after = found or models(seed, score, **more)
        run = load("tiny", ["promote.model=tickets", *overrides])
        asked = promote.stage(run, tuned.stage, before.stage, after.stage)
        stage_run = Toy(run, asked, store, tracked(f"sqlite:///{database}"), tmp_path / "work")
        return promote.promote.fn(stage_run, tuned, before, after, released)

    def wipe():
        database.write_bytes(empty_registry)

    client = promote.registry(f"sqlite:///{database}")
    return SimpleNamespace(
        run=run,
        made=made,
        models=models,
        scored=scored,
        held_out=held_out,
        wipe=wipe,
        client=client,
        store=store,
        root=tmp_path,
        database=database,
    )


def aliases(world) -> dict[str, str]:
    return {name: str(version) for name, version in world.client.get_registered_model("tickets").aliases.items()}


def versions(world) -> list:
    return sorted(world.client.search_model_versions("name = 'tickets'"), key=lambda version: int(version.version))


def test_challenger_always_champion_only_when_better(world):
    first = world.run(1, 0.6)
    assert first.result["aliases"] == ["challenger", "champion"] and "0.05 of the base model" in first.result["reason"]
    worse = world.run(2, 0.5)
    assert worse.result["aliases"] == ["challenger"] and "0.6 of champion 1: -0.1" in worse.result["reason"]
    assert aliases(world) == {"challenger": "2", "champion": "1"}
    within = world.run(3, 0.65, "promote.margin=0.1")
    assert within.result["aliases"] == ["challenger"]
    better = world.run(4, 0.75, "promote.margin=0.1")
    assert f"{METRIC} 0.75 against 0.6 of champion 1: +0.15, above the margin of 0.1" in better.result["reason"]
    assert aliases(world) == {"challenger": "4", "champion": "4"}
    assert versions(world)[3].tags["reason"] == better.result["reason"]
    assert [version.source.startswith("file:///") for version in versions(world)] == [True] * 4


def test_not_better_than_the_base_is_no_champion(world):
    assert world.run(1, 0.05).result["aliases"] == ["challenger"]
    assert aliases(world) == {"challenger": "1"}


def test_a_second_time_it_is_a_hit(world):
    world.run(1, 0.6)
    again = world.run(1, 0.6)
    assert again.cached and len(versions(world)) == 1


def test_the_champion_stays_champion_when_it_is_measured_anew(world):
    """Against itself it gains nothing, but it does not lose its place."""
    world.run(1, 0.6)
    again = world.run(1, 0.6, "promote.margin=0.01")
    assert again.result["aliases"] == ["challenger", "champion"] and "was champion before" in again.result["reason"]
    assert aliases(world) == {"challenger": "1", "champion": "1"} and len(versions(world)) == 1


def test_a_champion_that_was_never_measured_so_is_not_replaced(world):
    world.run(1, 0.6)
    second = world.run(2, 0.9, "evaluate.tasks=[arc]", "promote.metric=arc/easy", metric="arc/easy")
    assert second.result["aliases"] == ["challenger"]
    assert second.result["reason"].startswith("champion 1 was never measured by arc/easy")


@pytest.mark.parametrize(
    ("data", "asked"),
    [({"test": "newer rows"}, {}), ({}, {"rows": 20}), ({}, {"max_tokens": 9}), ({"count": 48}, {})],
)
def test_a_champion_that_was_asked_other_questions_is_told_of(world, data, asked):
    world.run(1, 0.6, max_tokens=8, rows=200)
    given = {"max_tokens": 8, "rows": 200} | asked
    second = world.run(2, 0.5, data=world.held_out(**data), **given)
    told = "champion 1 was measured on other questions, so the comparison is uncertain"
    assert second.result["reason"].endswith(f"; {told}")
    assert aliases(world) == {"challenger": "2", "champion": "1"}
    third = world.run(3, 0.9, data=world.held_out(**data), **given)  # so that a schedule over growing data goes on
    assert third.result["aliases"] == ["challenger", "champion"] and third.result["reason"].endswith(f"; {told}")
    fourth = world.run(4, 0.8, data=world.held_out(**data), **given)
    assert fourth.result["reason"].startswith(f"{METRIC} 0.8 against 0.9 of champion 3: -0.1")
    assert told[9:] not in fourth.result["reason"]


def test_the_same_questions_are_known_by_what_is_asked(world):
    """Not by the rows of training, nor by what more an evaluation looks at, nor by a number above that of all rows."""
    world.run(1, 0.6, rows=200)
    second = world.run(2, 0.9, data=world.held_out(training="more of them"), rows=None, samples=3, parity_rows=2)
    assert second.result["aliases"] == ["challenger", "champion"]


def test_questions_of_other_tasks_are_not_those_of_the_held_out_rows(world):
    arc = ("evaluate.tasks=[arc]", "promote.metric=arc/acc")
    world.run(1, 0.6, *arc, metric="arc/acc")
    second = world.run(2, 0.9, *arc, metric="arc/acc", data=world.held_out("newer rows"))
    assert second.result["reason"].startswith("arc/acc 0.3 against 0.3 of champion 1: +0")


def test_a_perplexity_of_texts_is_of_their_windows_too(world):
    name = "held_out/perplexity"
    short, long = (world.held_out(kind="text", length=length) for length in (64, 128))
    world.run(1, 9.0, f"promote.metric={name}", metric=name, base=20.0, data=short)
    second = world.run(2, 8.0, f"promote.metric={name}", metric=name, base=20.0, data=short)
    assert second.result["aliases"] == ["challenger", "champion"]
    third = world.run(3, 7.0, f"promote.metric={name}", metric=name, base=20.0, data=long)
    assert "was measured on other questions" in third.result["reason"]


def test_a_champion_of_before_questions_were_noted_is_compared(world):
    world.run(1, 0.6)
    world.client.delete_model_version_tag("tickets", "1", promote.ASKED + METRIC)
    assert world.run(2, 0.9).result["aliases"] == ["challenger", "champion"]


def killed(*_):
    raise KeyboardInterrupt


def test_a_version_of_an_attempt_that_died_is_used(world, monkeypatch):
    """It had registered the model, and was killed before it said so."""
    found = world.models(1, 0.6)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(type(world.store), "write", killed)
        world.run(1, 0.6, found=found)
    assert len(versions(world)) == 1
    assert world.run(1, 0.6, found=found).result["version"] == 1
    assert len(versions(world)) == 1 and aliases(world)["champion"] == "1"


def test_a_registry_that_was_wiped_is_filled_again(world):
    world.run(1, 0.6)
    world.wipe()
    again = world.run(1, 0.6)
    assert not again.cached and aliases(world) == {"challenger": "1", "champion": "1"}


def test_another_model_of_the_same_number_is_not_taken_for_this_one(world):
    world.run(1, 0.6)
    world.wipe()
    world.run(2, 0.4)
    again = world.run(1, 0.6)
    assert not again.cached and again.result["version"] == 2
    assert aliases(world) == {"challenger": "2", "champion": "2"}


def test_a_model_that_is_not_there_is_not_registered(world):
    found = world.models(1, 0.6)
    (world.root / "store" / found[0].key / "files/model").unlink()
    with pytest.raises(Fault, match=r"^file:///.*/merged: not registered: model: missing$"):
        world.run(1, 0.6, found=found)
    assert world.client.search_registered_models() == []


def test_an_adapter_is_registered_with_its_base_which_has_to_be_there(world):
    base = world.made(Stage("download", 1, {}), {})
    stage, link = Stage("export", 1, {"formats": ["adapter"]}), world.store.link
    parts = {"adapter": link(f"{stage.key}/files/adapter"), "base": link(f"{base.key}/files")}
    tuned = world.made(stage, {"uri": parts["adapter"]} | parts)
    found = (tuned, *world.models(1, 0.6)[1:])
    assert world.run(1, 0.6, found=found, released=base).result["aliases"] == ["challenger", "champion"]
    (version,) = versions(world)
    assert version.source == version.tags["finetune.adapter"] == parts["adapter"]
    assert version.tags["finetune.base"] == parts["base"]
    world.wipe()
    (world.root / "store" / base.key / "files/model").unlink()
    with pytest.raises(Fault, match=r"^file:///.*/adapter: not registered: its base: model: missing$"):
        world.run(1, 0.6, found=found, released=base)


def test_a_wrong_metric_shows_what_there_is(world):
    with pytest.raises(
        Fault,
        match=r"^promote.metric: held_out/accuracy: not evaluated; the metrics are arc/acc, held_out/exact_match$",
    ):
        world.run(1, 0.6, "promote.metric=held_out/accuracy")
    assert world.client.search_registered_models() == []


@pytest.mark.parametrize("name", ["team/model", "a:b", "it's", "..", "."])
def test_a_name_that_the_registry_refuses_is_refused_at_once(world, name):
    stages = [made.stage for made in world.models(1, 0.6)]
    with pytest.raises(Fault, match=r"promote\.model: .*: MLflow's registry does not allow slashes"):
        promote.stage(load("tiny", [f'promote.model="{name}"']), *stages)


def test_what_was_promoted_is_pinned(world):
    found = world.models(1, 0.6)
    world.run(1, 0.6, found=found)
    pin = world.store.read("pins/tickets-1.json")[0].decode()
    assert all(made.key in pin for made in found)


def test_a_server_is_not_given_a_folder_s_uri_as_a_source(world):
    """MLflow's server refuses file:// unless it is an artifact of its own."""
    created = []
    client = SimpleNamespace(
        create_registered_model=lambda name: None,
        search_model_versions=lambda query: [],
        create_model_version=lambda name, source, **more: created.append((source, more)) or SimpleNamespace(version=1),
    )
    tuned, _, _ = world.models(1, 0.6)
    assert promote._register(client, "tickets", tracked("http://127.0.0.1:9"), tuned, {}) == 1  # pyright: ignore
    source, more = created[0]
    assert source == tuned.result["uri"].replace("file://", "folder://")
    assert more["tags"]["finetune.uri"] == tuned.result["uri"]


def measured_as_none(world):
    tuned, before, _ = world.models(1, 0.6)
    asked = {"data": world.held_out().stage.fingerprint}
    return tuned, before, world.made(Stage("evaluate", 1, {"again": 1}, asked), {"metrics": {METRIC: float("nan")}})


def test_a_champion_keeps_its_value_when_it_is_measured_as_no_number(world):
    """With nan as its value nothing would ever be better."""
    world.run(1, 0.6)
    again = world.run(1, 0.6, found=measured_as_none(world))
    assert "it was champion before" in again.result["reason"] and versions(world)[0].tags[METRIC] == "0.6"
    assert world.run(2, 0.7).result["aliases"] == ["challenger", "champion"]


def test_a_model_whose_value_is_no_number_is_registered_and_no_champion(world):
    first = world.run(1, 0.6, found=measured_as_none(world))
    assert first.result["aliases"] == ["challenger"] and METRIC not in versions(world)[0].tags
    assert world.run(2, 0.7).result["aliases"] == ["challenger", "champion"]


@pytest.mark.parametrize("tag", ["high", "nan", ""])
def test_a_champion_whose_tag_is_no_number_is_not_replaced(world, tag):
    world.run(1, 0.6)
    world.client.set_model_version_tag("tickets", "1", METRIC, tag)
    second = world.run(2, 0.9)
    assert second.result["aliases"] == ["challenger"] and "was never measured" in second.result["reason"]


def right(*rows: int, of: int) -> dict[str, list[list[float]]]:
    return {METRIC: [[float(row in rows), 1] for row in range(of)]}


@pytest.mark.parametrize(
    ("base", "tuned", "wins", "says"),
    [
        (right(of=31), right(7, of=31), False, "+0.03226, 1 of 31, within noise: challenger (higher in 1 rows"),
        (right(of=11), right(7, of=11), False, "1 of 11, within noise: challenger"),
        (right(of=70), right(1, 2, 3, of=70), False, "3 of 70, within noise: challenger"),
        (right(of=31), right(*range(20), of=31), True, "20 of 31, outside noise (higher in 20 rows, lower in 0, p "),
        (right(of=64), right(*range(64), of=64), True, "64 of 64, outside noise"),
        # As many more are right as in the next one, but others have become wrong.
        (right(*range(8), of=99), right(*range(4, 18), of=99), False, "higher in 10 rows, lower in 4, p 0.09 of 0.05"),
        (right(*range(8), of=99), right(*range(14), of=99), True, "higher in 6 rows, lower in 0, p 0.016 of 0.05"),
    ],
)
def test_a_gain_within_noise_makes_no_champion(world, base, tuned, wins, says):
    found = world.scored(base, tuned)
    made = world.run(1, 0.0, "promote.margin=0", found=found)
    assert ("champion" in made.result["aliases"]) == wins and says in made.result["reason"], made.result["reason"]
    by_margin = world.run(1, 0.0, "promote.confidence=0", found=found)
    assert "champion" in by_margin.result["aliases"] and "noise" not in by_margin.result["reason"]


def test_a_champion_is_compared_row_by_row_too(world):
    """Its evaluation is found by its pin. A gain over the base alone is not enough."""
    base, first, second = right(of=64), right(*range(30), of=64), right(*range(33), of=64)
    assert "champion" in world.run(1, 0.0, found=world.scored(base, first)).result["aliases"]
    made = world.run(2, 0.0, found=world.scored(base, second, seed=2))
    assert made.result["aliases"] == ["challenger"]
    by_champion, by_base = made.result["reason"].split("; ")
    assert "0.4688 of champion 1: +0.04688, 33 of 64, within noise: challenger (higher in 3 rows" in by_champion
    assert "0 of the base model: +0.5156, above the margin of 0, 33 of 64, outside noise" in by_base


def test_evaluations_without_scores_are_compared_by_their_standard_errors(world):
    """Those from before scores were kept, and groups of lm-eval's tasks."""

    def decided(was, now, error, **more):
        known = {METRIC: was, f"{METRIC}_stderr": error}, {METRIC: now, f"{METRIC}_stderr": error}
        made = world.run(1, 0.0, found=world.scored(*known), **more)
        return "champion" in made.result["aliases"], made.result["reason"]

    wins, reason = decided(0.0, 0.032, 0.032)
    assert not wins and "within noise: challenger (by standard errors, as the rows differ" in reason
    wins, reason = decided(0.1, 0.4, 0.05)
    assert wins and "outside noise (by standard errors" in reason


def test_evaluations_that_say_nothing_of_noise_are_to_be_made_again(world):
    made = world.run(1, 0.0, found=world.scored({METRIC: 0.0}, {METRIC: 0.5}))
    assert made.result["aliases"] == ["challenger"]
    assert (
        "it is unknown whether that is noise" in made.result["reason"]
        and "--from-stage evaluate-base" in made.result["reason"]
    )
