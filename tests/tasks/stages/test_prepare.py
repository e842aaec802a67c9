"""tasks/stages/prepare.py: what prepared data are made from, and what makes them anew."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.load import load
from conf.planner import hardware
from contract.faults import Fault, Stopped
from flows.pipeline import PIPELINE
from tasks.run import accounts, artifact
from tasks.run.artifact import Stage, Work
from tasks.run.outcomes import Outcomes
from tasks.run.progress import newest
from tasks.run.session import StageRun
from tasks.run.steps import Request, Step
from tasks.stages import prepare
from tasks.store import open_store

MODEL = Stage("download", 1, {"commit": "one"})


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """A folder with two files of rows."""
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "runs"))
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"input": "{name}", "output": "x"}}\n')
    return tmp_path


def stage(*overrides: str, model: Stage = MODEL) -> Stage:
    return prepare.stage(load("tiny", overrides), model)


def mixture(*parts: tuple[Path, float]) -> list[str]:
    texts = [f"{{source: {path}, weight: {weight}}}" for path, weight in parts]
    return ["data.source=null", f"data.mixture=[{', '.join(texts)}]"]


CHANGES = [
    "data.source={files}/b.jsonl",
    "data.shape=pairs",
    "data.input=output",
    "data.rows=1",
    "data.rows_seed=1",
    "data.validation=0.5",
    "data.test=0.5",
    "data.duplicates=drop",
    "data.bad_rows=drop",
    "data.too_long=truncate",
    "data.seq_length=32",
    "data.packed=true train.micro_batch=1",
    "data.template='{{input}}{{output}}'",
    "data.stop=x",
    "data.loss_on=all",
    "data.seed=1",
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_bears_on_the_rows_and_their_tokens_makes_them_anew(files, change):
    overrides = change.format(files=files).split()
    source = f"data.source={files}/a.jsonl"
    changed = stage(*([source] if "data.source" not in change else []), *overrides)
    assert changed != stage(source)
    assert len(artifact.differences(stage(source), changed)) <= 3


@pytest.mark.parametrize(
    "change",
    [
        "optimizer.lr=1e-9",
        "train.steps=7",
        "train.global_batch=32",
        "train.seed=5",
        "data.processes=3",
        "data.workers=2",
        "data.revision=other",  # of the Hub alone
        "layout.gpus_per_node=2 layout.tp=2 layout.sp=true train.micro_batch=8",
        "evaluate.max_tokens=2",
    ],
)
def test_what_does_not_makes_nothing(files, change):
    source = f"data.source={files}/a.jsonl"
    assert stage(source, *change.split()) == stage(source)


def test_the_model_is_an_input_as_the_tokenizer_comes_from_it(files):
    assert stage() != stage(model=Stage("download", 1, {"commit": "two"}))
    run = load("tiny", ["model.source=tiny://llama"])
    stages = PIPELINE.stages(run)
    assert stages["prepare"].inputs == {"model": stages["download"].fingerprint}
    assert stages["train"].inputs["data"] == stages["prepare"].fingerprint


def test_packed_rows_depend_on_what_the_layout_cuts_them_into(files):
    packed = ["data.packed=true", "train.micro_batch=1"]
    cut = ["layout.gpus_per_node=2", "layout.tp=2", "layout.sp=true"]
    assert stage(*packed) == stage(*packed, *cut) and stage(*packed).config["multiple"] == 16
    wide = ["layout.gpus_per_node=96", "layout.cp=12", "train.global_batch=96", "data.seq_length=96"]
    assert stage(*packed, *wide).config["multiple"] == 48
    assert "multiple" not in stage(*cut, "train.micro_batch=8").config


def test_a_template_s_file_counts_by_its_content(files):
    for name, text in (("one", "x"), ("two", "x"), ("three", "y")):
        (files / f"{name}.jinja").write_text(text)
    one, two, three = (stage(f"data.template={files}/{name}.jinja") for name in ("one", "two", "three"))
    assert one == two != three
    with pytest.raises(Fault, match=r"^data\.template: .*/none\.jinja: no such file$"):
        stage(f"data.template={files}/none.jinja")


def test_a_mixture_counts_by_its_parts_and_their_weights(files):
    a, b = files / "a.jsonl", files / "b.jsonl"
    found = stage(*mixture((a, 1), (b, 3)))
    assert [source["weight"] for source in found.config["sources"]] == [1.0, 3.0]
    assert found != stage(*mixture((a, 1), (b, 2))) and found != stage(*mixture((b, 3), (a, 1)))
    b.rename(files / "c.jsonl")
    assert found == stage(*mixture((a, 1), (files / "c.jsonl", 3)))
    with pytest.raises(
        Fault, match=r"^data\.mixture\[1\]\.source: .*/b\.jsonl: no such file; did you mean .*/c\.jsonl"
    ):
        stage(*mixture((a, 1), (b, 3)))


def test_a_miss_names_what_differs(files):
    before = stage(f"data.source={files}/a.jsonl")
    (files / "a.jsonl").write_text("{}\n")
    after = stage(f"data.source={files}/a.jsonl", "data.seq_length=32")
    seq_length, content = artifact.differences(before, after)
    assert seq_length == "seq_length: 64 -> 32"
    assert content.startswith('sources[0].content: "')


def test_a_run_without_data_is_refused(files):
    with pytest.raises(Fault, match=r"^data\.source: required by the flow"):
        stage("data.source=null")
    with pytest.raises(
        Fault,
        match=r"^data\.source: tiny://letters: no such data; there is tiny://tickets, .* and tiny://texts$",
    ):
        stage("data.source=tiny://letters")


@pytest.fixture
def stage_run(files):
    """Of the stage, and the model that the run starts from."""

    def fill(work: Work) -> dict:
        for name in ("config.json", "tokenizer.json", "vocab/tokenizer.model", "a.safetensors", "b.bin", "c.PTH"):
            path = work.folder / "files" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(name)
        return {}

    def begin(*overrides: str) -> tuple[StageRun, artifact.Artifact, Work]:
        run = load("tiny", overrides)
        asked, store = Request({"prepare": prepare.stage(run, MODEL)}, {}), open_store(str(files / "store"))
        session = SimpleNamespace(run=run, request=asked, store=store, folder=files)
        session.tracking = session.outcomes = session.ending = None
        session.spent = accounts.Spent(run, hardware.of(run))
        begun = StageRun(session, Step("prepare", prepare))  # type: ignore
        made = artifact.get_or_make(MODEL, store, fill, files / "work", lambda _: None, {"flow": "toy"})
        return begun, made, Work(files / "work/prepare", None, lambda _: None)  # type: ignore

    return begin


def test_of_the_model_only_the_tokenizer_is_fetched(stage_run, files):
    run = prepare._here(*stage_run())
    folder = files / "work/prepare/tokenizer"
    assert run.paths.model == str(folder) and run.paths.data == str(files / "work/prepare/files")
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {
        *("config.json", "tokenizer.json", "tokenizer.model")
    }


def test_the_trainer_is_told_of_files_by_their_full_paths(stage_run, files, monkeypatch):
    monkeypatch.chdir(files)
    run = prepare._here(*stage_run("data.source=a.jsonl", "data.rows=7"))
    assert (run.data.source, run.data.rows, run.data.mixture) == (str(files / "a.jsonl"), 7, ())
    run = prepare._here(*stage_run(*mixture((Path("b.jsonl"), 2), (Path("a.jsonl"), 1))))
    assert [(part.source, part.weight) for part in run.data.mixture] == [
        *((str(files / "b.jsonl"), 2.0), (str(files / "a.jsonl"), 1.0))
    ]
    assert run.data.source is None


def test_a_stage_that_is_stopped_ends_as_cancelled(stage_run, monkeypatch):
    """Prefect shows a stack trace of what it raises once its retries are used up."""

    def stop(*_: object) -> None:
        raise Stopped("trainer.prepare: stopped")

    begun, *_ = stage_run()
    begun._outcomes = Outcomes({})
    monkeypatch.setattr(begun, "_get_or_make", stop)
    state = begun.get_or_make(lambda work: {})
    assert state.is_cancelled() and state.message == "trainer.prepare: stopped"
    assert begun._outcomes.by_stage["prepare"].failed


def test_data_that_are_too_few_to_train_with_are_refused_by_the_stage_that_has_counted_them(files):
    """Fewer rows to validate with than a batch were noticed by train, after the base's evaluation."""
    counts = {"training": 40, "validation": 3, "test": 4}
    asked = stage()
    result = {"kind": "sft", "rows": counts, "sequences": counts}
    made = artifact.Artifact(asked, {}, result, {})
    with pytest.raises(Fault) as raised:
        prepare.require_enough(load("tiny", ["train.validate_every=5"]), made)
    assert str(raised.value) == (
        f"train.validate_every: 5, but {made.key} contains 3 sequences for validation, fewer than one batch of 16; "
        "use a larger data.validation, a smaller train.global_batch, or train.validate_every: 0"
    )
    prepare.require_enough(load("tiny", ["train.validate_every=0"]), made)


def edit_rows(files: Path) -> None:
    (files / "a.jsonl").write_text('{"input": "b", "output": "x"}\n')


def add_rows(files: Path) -> None:
    (files / "c.jsonl").write_text('{"input": "c", "output": "x"}\n')


def edit_template(files: Path) -> None:
    (files / "chat.jinja").write_text("{{ messages[0] }}")


@pytest.mark.parametrize("change", [edit_rows, add_rows, edit_template])
def test_what_is_edited_between_the_fingerprint_and_its_preparation_is_refused(files, change):
    (files / "chat.jinja").write_text("{{ messages }}")
    run = load("tiny", [f"data.source={files}", f"data.template={files}/chat.jinja"])
    asked = prepare.stage(run, MODEL)
    prepare.require_unchanged(run.data, asked)
    change(files)
    with pytest.raises(Fault, match=r"^data\.(source|template): .*: has changed since the run began; start it again$"):
        prepare.require_unchanged(run.data, asked)


@pytest.mark.parametrize(
    "text, found",
    [
        ("", (0, 0)),
        ('{"done": 3, "total": 9}\n', (3, 9)),
        ('{"done": 3, "total": 9}\n{"done": 4, "tot', (3, 9)),
        ('{"done": 3, "total": 9}\n{"phase": "write"}\nnull\n[]\n', (3, 9)),
        ("x" * 10_000 + '\n{"total": 9, "done": 5}\n', (5, 9)),
    ],
)
def test_progress_is_the_last_whole_line(tmp_path, text, found):
    (tmp_path / "progress.jsonl").write_text(text)
    assert newest(tmp_path / "progress.jsonl", "done", "total") == found
    assert newest(tmp_path / "none.jsonl", "step") == (0,)


def test_the_page_names_the_list_where_it_lies_in_the_store(tmp_path, monkeypatch):
    store, pages = open_store(str(tmp_path / "store")), []
    report = {"rows": dict.fromkeys(("read", "kept", "training", "validation", "test"), 0), "tokens": {}, "sources": []}
    report |= {"dropped": {}, "template": {}, "alike": {"file": "alike.jsonl", "counts": {"copy": 1}, "samples": {}}}
    store.write("prepare/1/files/report.json", json.dumps(report).encode())
    monkeypatch.setattr(prepare, "create_markdown_artifact", lambda page, **_: pages.append(page))
    prepare.publish(store, SimpleNamespace(key="prepare/1"), "tiny")
    assert f"`{store.link('prepare/1/files')}/alike.jsonl`" in pages[0]


def test_prompts_are_rows_with_one_answer_of_a_source_that_is_named_by_its_own_key():
    run = load("tiny-rl", ["reinforce.source=tiny://letters"])
    with pytest.raises(Fault, match=r"^reinforce\.source: tiny://letters: no such data"):
        PIPELINE.stages(run)
    made = SimpleNamespace(key="prepare/0123", result={"kind": "sft"})
    prepare.require_prompts(run, made)  # type: ignore
    made.result["kind"] = "preference"
    with pytest.raises(
        Fault, match=r"^reinforce\.source: prepare/0123 contains rows with a chosen and a rejected answer"
    ):
        prepare.require_prompts(run, made)  # type: ignore
