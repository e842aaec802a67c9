"""Whatever is in the files that a run reads, and whatever they are: a line, no stack trace, no hang, nothing changed.

Each draw damages a whole set of inputs in one to three places, and calls what every command checks before it writes.
Draws are the same each time (derandomize); what failed once stands below as an example.
"""

import hashlib
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conf.load import load
from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault, line_of
from contract.output_marks import OWNER
from tasks.sources import hub
from tasks.stages import plan
from tests.support import preloaded, small_model
from tests.support.damage import Become, Cut, Drop, Raw, Say, Set
from tests.support.drawn_damage import (
    CONFIG,
    DAMAGE,
    DEEP,
    INDEX,
    NORM,
    RUN,
    SETTINGS,
    SHARD,
    TOKENIZER,
    YAML,
    as_override,
)
from tests.support.small_model import SHARDS
from trainer.checks import inputs, places
from trainer.data.tokens import tokenizer

SECONDS = 10
SPLITS = ("training", "validation", "test")
FEW, MANY = 100, 2000


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "world"
    small_model.write(folder / "model")
    for name in ("base", "data", "bystander"):
        (folder / name).mkdir()
    (folder / "bystander" / "rows.jsonl").write_text("mine\n")
    (folder / "base" / "weights").write_text("stand for the converted model")
    (folder / "base" / "source.json").write_text(json.dumps({"model.norm.weight": ["BF16", [16], "0" * 64]}))
    facts = {"architecture": "Qwen3MoeForCausalLM", "precision": "bf16", "mtp": True, "stamps": {}, "digest": "0" * 64}
    checkpoints.mark(folder / "base", **facts, tensors=1, left_out=[])
    row = b'{"input": "a", "output": "b"}\n'
    for name in SPLITS:
        (folder / "data" / f"{name}.jsonl").write_bytes(row * 4)
    digest = hashlib.sha256(row * 4).hexdigest()
    prepared = {
        "kind": "sft",
        "files": {f"{name}.jsonl": {"size": 4 * len(row), "sha256": digest} for name in SPLITS}
        | {"template.json": {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}},
        "settings": {"seq_length": 64},
        "sources": [],
        "tokenizer": tokenizer.digest(folder / "model"),
        "rows": {"training": 4, "validation": 4, "test": 4},
        "sequences": {"training": 4, "validation": 4, "test": 4},
        "vocab_size": 48,
        "pad_id": 0,
    }
    (folder / "data" / "prepared.json").write_text(json.dumps(prepared))
    (folder / "data" / "template.json").write_text("{}")
    (folder / RUN).write_text(json.dumps(YAML))  # which is YAML too
    return folder


@contextmanager
def in_time() -> Iterator[None]:
    """10 s of work, or of waiting without any: on a busy machine the clock says nothing."""
    began = time.process_time()
    used = began

    def over(*_: object) -> None:
        nonlocal used
        now = time.process_time()
        if now - began > SECONDS or now - used < 0.05:
            raise TimeoutError(f"after {now - began:.1f} s of work")
        used = now
        signal.alarm(SECONDS)

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fetch(run: Run) -> None:
    """As stage download does, of a folder."""
    if hub.kind(run.model.source) == "folder":
        hub.fetch(hub.resolve(run.model.source), Path("out/fetched"), False, False)


def checked(check: Callable[[Run], None], may_write: Callable[[Run], None]) -> Callable[[Run], None]:
    def both(run: Run) -> None:
        try:
            may_write(run)
            check(run)
        except OSError as error:  # trainer/startup/entry.py has a line for some
            if line := line_of(error):
                raise Fault(line) from None
            raise

    return both


CHECKS: dict[str, Callable[[Run], Any]] = {
    "plan": plan.settle,
    "download": fetch,
    "convert": checked(inputs.check_convert, places.check_convert),
    "prepare": places.check_prepare,
    "train": checked(inputs.check_train, places.check_train),
    "export": checked(inputs.check_export, places.check_export),
    "evaluate": checked(inputs.check_evaluate, places.check_evaluate),
}


def outputs(folder: Path) -> list[str]:
    return [f"paths.{name}=out/{name}" for name in ("output", "logs", "export", "evaluation", "parity")]


def said(call: Callable[[], Any]) -> str:
    """The lines of a fault; "" where there is none. Anything else that is raised is the test's failure."""
    text = ""
    try:
        with in_time():
            call()
    except Fault as fault:
        text = str(fault)
        assert text.strip() and len(text) < 20_000
    return text


def all_said(folder: Path, overrides: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    runs: list[Run] = []
    given = [f"paths.{name}={name}" for name in ("model", "base", "data")] + ["paths.served=model"]
    mine = {text.partition("=")[0] for text in overrides}
    given = [text for text in given + outputs(folder) if text.partition("=")[0] not in mine]
    found["load"] = said(lambda: runs.append(load("./run.yaml", given + overrides)))
    for run in runs:
        if run.layout.auto:  # the trainer refuses it; the plan settles it
            found["plan"] = said(lambda run=run: plan.settle(run))
            continue
        found |= {name: said(lambda check=check, run=run: check(run)) for name, check in CHECKS.items()}
    return found


def content(folder: Path) -> dict[str, tuple]:
    """All that lies in a folder, outputs aside."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name, status = str(path.relative_to(folder)), path.lstat()
        if name.split("/")[0] == "out":
            continue
        small = stat.S_ISREG(status.st_mode) and status.st_size < 10**7
        found[name] = (status.st_mode, status.st_size, path.read_bytes() if small else b"")
    return found


@pytest.fixture(scope="module")
def damaged(original, tmp_path_factory):
    """damaged(damage): what every command says of the inputs, so damaged; nothing outside its outputs may change."""
    home = Path.cwd()
    environment = dict(os.environ)
    place = tmp_path_factory.mktemp("damaged") / "world"

    def damaged(damage) -> dict[str, str]:
        os.chdir(home)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(original, place)
        for one in damage:
            one.apply(place)
        before = content(place)
        os.chdir(place)
        os.environ["RANK"] = "0"  # so that training does not prepare rows by itself
        try:
            found = all_said(place, [one.text for one in damage if isinstance(one, Say)])
        finally:
            os.chdir(home)
            os.environ.clear()
            os.environ.update(environment)
        kept = {name.split("/")[0] for name in before}  # what is beside them may be an output that the damage names
        after = {name: one for name, one in content(place).items() if name.split("/")[0] in kept}
        assert after == before, "a file outside the outputs has changed"
        return found

    yield damaged
    shutil.rmtree(place, ignore_errors=True)


def test_undamaged_inputs_pass_every_check(damaged):
    assert {name: line for name, line in damaged([]).items() if line} == {}


LISTS = st.lists(DAMAGE, min_size=1, max_size=3)
DRAWN = dict(
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
FOUND = [  # by hand, in the version of 22 November
    [Set(CONFIG, ("architectures",), "Qwen3MoeForCausalLM")],
    [Set(CONFIG, ("architectures",), 7)],
    [Set(CONFIG, ("architectures",), ["x" * 1_000_000])],
    [Set(CONFIG, ("layer_types",), 7)],
    [Set(CONFIG, ("num_experts",), 0)],
    [Set(SHARD, (NORM, "dtype"), "I16")],
    [Set(CONFIG, ("architectures", 0), "MixtralForCausalLM")],
    [Set(CONFIG, ("architectures", 0), "Qwen2MoeForCausalLM")],
    [Set(CONFIG, ("architectures", 0), "GptOssForCausalLM")],
    [Set(CONFIG, ("architectures", 0), "Unheard")],
    [Set(CONFIG, ("rms_norm_eps",), "x")],
    [Set(CONFIG, ("rms_norm_eps",), float("nan"))],
    [Set(CONFIG, ("num_hidden_layers",), 2**24)],
    [Set(SHARD, (NORM, "shape"), "16")],
    [Drop(SHARD, (NORM, "dtype"))],
    [Raw(CONFIG, DEEP[0])],
    [Raw(SHARD, (200_000).to_bytes(8, "little") + DEEP[0])],
    [Become(SHARD, "folder")],
    [Become(SHARD, "FIFO")],
    [Set(INDEX, ("weight_map", NORM), 3)],
    [Set(TOKENIZER, ("model",), None)],
    [Set(TOKENIZER, ("model",), {"a": {}})],
    [Set(TOKENIZER, ("model", "vocab", "a"), {})],
    [Set(SETTINGS, ("added_tokens_decoder", "99"), {"content": "<new>"})],
    [as_override("paths.model", "x" * 256)],
    [as_override("paths.base", "run.yaml/x")],
    [as_override("paths.base", "x" * 256)],
    [as_override("model.source", "x" * 256)],
    [as_override("train.steps", 10**26)],
    [as_override("adapter.targets", ["linear_qkv", "linear_qkv"])],
]


@pytest.mark.parametrize("damage", FOUND, ids=lambda damage: str(damage[0])[:60])
def test_what_was_found_by_hand_is_refused_in_a_line(damaged, damage):
    found = damaged(damage)
    assert found["load"] or found["convert"]


# By what is wrong: the damage, and what the line has to name.
BROKEN = {
    "a shard that ends early": (Cut(SHARD, 0.9), (SHARD, "truncated")),
    "an index that names another shard": (Set(INDEX, ("weight_map", NORM), SHARDS[1]), (SHARD, NORM)),
    "an index with a tensor too many": (Set(INDEX, ("weight_map", "model.x"), SHARDS[0]), (INDEX, "model.x")),
    "a folder for a shard": (Become(SHARD, "folder"), (SHARD, "a folder")),
    "a folder for config.json": (Become(CONFIG, "folder"), (CONFIG, "a folder")),
    "a FIFO for a shard": (Become(SHARD, "FIFO"), (SHARD, "a FIFO")),
    "a FIFO for the index": (Become(INDEX, "FIFO"), (INDEX, "a FIFO")),
    "a header of 200,000 brackets": (Raw(SHARD, (200_000).to_bytes(8, "little") + DEEP[0]), (SHARD, "nested")),
    "tensors that overlap": (Set(SHARD, (NORM, "data_offsets"), [0, 32]), (SHARD, NORM, "overlaps")),
    "a tensor without dtype": (Drop(SHARD, (NORM, "dtype")), (SHARD, NORM, "dtype")),
    "architectures that are a number": (Set(CONFIG, ("architectures",), 7), (CONFIG, "architectures")),
    "an architecture that is a number": (Set(CONFIG, ("architectures", 0), 7), (CONFIG, "architectures")),
}
COMMANDS = {
    "convert": ("convert", "paths.base=out/base"),
    "convert.to=none": ("convert", "paths.base=out/base", "convert.to=none"),
    "direct load": ("train", "paths.base=base", "convert.to=none"),
    "export": ("export", "paths.base=base", "export.checkpoint=base"),
}


@pytest.fixture(scope="module")
def command():
    with preloaded.python("from trainer.checks import inputs, places\nfrom trainer.startup import entry") as run:
        yield run


@pytest.mark.slow
@pytest.mark.parametrize("wrong", BROKEN)
@pytest.mark.parametrize("asked", COMMANDS)
@pytest.mark.timeout(60, method="thread")
def test_a_command_names_the_file_and_makes_nothing(asked, wrong, command, original, tmp_path):
    damage, named = BROKEN[wrong]
    place, (module, *overrides) = tmp_path / "world", COMMANDS[asked]
    shutil.copytree(original, place)
    damage.apply(place)
    before = content(place)
    given = [f"paths.{name}={name}" for name in ("model", "data")] + outputs(place)
    done = command(f"trainer.{module}", "./run.yaml", *given, *overrides, cwd=place)
    assert (done.code, done.output) == (2, ""), done.errors
    assert done.errors.startswith("error: ") and done.errors.count("\n") == 1, done.errors
    assert all(part in done.errors for part in named), done.errors
    assert content(place) == before
    made = [path for path in (place / "out").rglob("*") if path.is_file() and not path.name.startswith(OWNER)]
    assert made == []


@settings(max_examples=FEW, **DRAWN)
@given(LISTS)
@example([Raw(RUN, b"a: !!int ''")])
@example([Raw(RUN, b"hardware: {gpu: ./model.yaml}")])
@example([Set("base/complete.json", ("files",), None)])
@pytest.mark.timeout(1200, method="thread")
def test_no_damage_ends_in_a_stack_trace_a_hang_or_a_changed_file(damaged, damage):
    damaged(damage)


@pytest.mark.slow
@settings(max_examples=MANY, **DRAWN)
@given(LISTS)
@pytest.mark.timeout(7200, method="thread")
def test_nor_do_ten_times_as_many(damaged, damage):
    damaged(damage)
