"""benchmarks/study: layouts are measured in a row, kept, and compared on one page; one that fails stops no other."""

import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from benchmarks.study import __main__ as study
from benchmarks.study import figures, measured, page, rows
from conf.load import load
from conf.planner.verdict import facts_of
from conf.rules.layout import problems
from contract.faults import Fault
from tasks.run import launch
from tests.benchmarks.study.answers import answer, pieces


@pytest.fixture
def trials(monkeypatch):
    """Trials that answer at once. Each is noted by its arguments; what stands in `fails` fails."""
    noted, fails = [], {}

    def process(arguments, log, say, stop):
        noted.append(arguments)
        for text, error in fails.items():
            if text in arguments:
                raise error
        traces = arguments[arguments.index("--profile-to") + 1] if "--profile-to" in arguments else ""
        pp = 2 if "layout.pp=2" in arguments else 1
        ranks = 2 if "layout.gpus_per_node=2" in arguments else 1
        for line in pieces(answer(ranks, pp, 300 + 10 * len(noted), traces and f"{traces}/profile.html")):
            say(line)

    monkeypatch.setattr(launch, "process", process)
    return SimpleNamespace(noted=noted, fails=fails)


def call(folder, *arguments):
    return study.main(["tiny", "--gpus", "2", "--to", str(folder), *arguments])


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert call(tmp_path / "file/study") == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/file/study: Not a directory\n"


@pytest.mark.parametrize("name", sorted(file.stem for file in rows.STUDIES.glob("*.yaml")))
def test_every_listed_row_is_a_legal_layout(name):
    found, lists = rows.listed(name)
    assert found and lists
    assert len({(row.of, row.name) for row in found}) == len(found)
    for row in found:
        run = load(row.configuration, row.overrides, illegal=True)
        assert not problems(run, facts_of(run)), row.title


def test_the_documented_study_is_of_six_rows_on_one_and_two_gpus():
    found, _ = rows.listed("gpt2-large")
    six = [row for row in found if row.of == "like-for-like" and row.documented_ms]
    assert [(row.name, row.gpus, row.documented_ms) for row in six] == [
        ("1 GPU", 1, 438),
        ("DP2", 2, 437),
        ("TP2", 2, 543),
        ("TP2+SP", 2, 540),
        ("CP2", 2, 515),
        ("PP2", 2, 820),
    ]


def test_what_was_measured_is_kept_until_it_is_another_configuration_or_other_code(trials, tmp_path, monkeypatch):
    assert call(tmp_path) == 0
    first = len(trials.noted)
    assert first == 6 and call(tmp_path) == 0 and len(trials.noted) == first
    assert call(tmp_path, "--only", "TP2", "train.seed=5") == 0 and len(trials.noted) == first + 1
    assert call(tmp_path, "--only", "DP2", "--profile") == 0 and len(trials.noted) == first + 2
    assert call(tmp_path, "--only", "DP2") == 0 and len(trials.noted) == first + 2  # a profile is no less
    monkeypatch.setattr(measured, "versions", lambda: {"the trainer's code": "another"})
    assert call(tmp_path, "--only", "DP2") == 0 and len(trials.noted) == first + 3


def test_a_layout_that_fails_is_a_row_and_is_tried_again(trials, tmp_path, capsys):
    trials.fails["layout.cp=2"] = Fault("layout.cp: 2 does not go")
    trials.fails["layout.pp=2"] = launch.Broken(
        "trainer.trial failed with code 1; its last lines:\n  File x\nKeyError: 3"
    )
    assert call(tmp_path) == 1
    report = json.loads((tmp_path / study.RESULT).read_text())
    failed = {row["name"]: row["figures"].get("failed") for row in report["rows"]}
    assert failed["CP2"] == "layout.cp: 2 does not go" and failed["PP2"].startswith("KeyError: 3; ")
    assert [name for name, why in failed.items() if why] == ["CP2", "PP2"]
    assert "layout.cp: 2 does not go" in (tmp_path / study.PAGE).read_text() and "CP2" in capsys.readouterr().out
    trials.fails.clear()
    assert call(tmp_path) == 0 and len(trials.noted) == 6 + 2


def test_an_answer_that_was_broken_off_is_measured_again(trials, tmp_path):
    assert call(tmp_path, "--only", "DP2") == 0
    (file,) = (tmp_path / "rows").iterdir()
    file.write_text(file.read_text()[:100])
    assert call(tmp_path, "--only", "DP2") == 0 and len(trials.noted) == 2


def test_the_report_alone_measures_nothing(trials, tmp_path, monkeypatch):
    call(tmp_path, "--only", "DP2")
    monkeypatch.setattr(measured, "versions", lambda: {"device": "another"})
    assert call(tmp_path, "--report") == 1 and len(trials.noted) == 1
    report = json.loads((tmp_path / study.RESULT).read_text())
    told = {row["name"]: row["figures"].get("failed") for row in report["rows"]}
    assert told.pop("DP2") is None and set(told.values()) == {"not measured yet"}
    assert report["versions"]["device"] == "cpu"


def test_the_page_is_whole_and_needs_nothing_else(trials, tmp_path):
    assert call(tmp_path, "--profile") == 0
    text = (tmp_path / study.PAGE).read_text()
    assert "http" not in text and "<script" not in text
    drawn = [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(drawn) >= 4 + 6  # time, memory, kernels, loss, and the ranks of each layout
    for name in ("1 rank", "DP2", "TP2+SP", "PP2"):
        assert f"dense, {name}" in text
    assert 'href="profiles/dense-PP2/profile.html"' in text
    assert "stage 1 is planned 6.6 GB above stage 0: logits and their loss +6.6 GB" in text


def test_memory_of_a_rank_is_states_and_what_comes_and_goes():
    one = figures.of(answer(2, 2))["memory"][1]
    assert one["states"] == pytest.approx({"weights": 1.0, "gradients": 2.0, "optimizer": 6.0})
    assert one["gb"] == pytest.approx(1.02 * 36.6) and one["passing"] == pytest.approx(one["gb"] - 9.0)


def test_ranks_that_hold_alike_are_said_to():
    assert figures.why(answer(2, 1)["ranks"]) == ["all 2 ranks use equal memory"]
    assert figures.why(answer(1, 1)["ranks"]) == []


def test_the_planner_finds_layouts_where_none_are_listed():
    found = rows.found("llama31-8b-1xh100", (), 4)
    assert 2 <= len(found) <= rows.FOUND and len({row.name for row in found}) == len(found)
    assert all(row.gpus == 4 for row in found)


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["--gpus", "0"], "--gpus: 0 is not a number of GPUs"),
        (["--gpus", "7"], "--gpus: 7: tiny has layouts of 1, 2"),
        (["--list", "dens"], "--list: dens: tiny has dense"),
        (["--row", "layout.tp=2"], "--row: 'layout.tp=2' is not a row"),
        (["--layers", "0"], "--layers: 0 is not a number of layers"),
        (["--steps", "2"], "--steps: 2: the first 2 are not measured"),
        (["--only", "DP3"], "--only: DP3: there are 1 rank"),
        (["train.sead=3"], "override train.sead=3: train.sead: unknown key"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(trials, tmp_path, capsys, arguments, line):
    assert study.main(["tiny", "--to", str(tmp_path), *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}") and not trials.noted


def test_rows_of_the_command_line_are_measured_instead(trials, tmp_path):
    assert call(tmp_path, "--row", "TP: layout.gpus_per_node=2 layout.tp=2 train.micro_batch=4") == 0
    (noted,) = trials.noted
    assert noted[:2] == ["trainer.trial", "tiny"]
    assert noted[-3:] == ["layout.gpus_per_node=2", "layout.tp=2", "train.micro_batch=4"]


def test_columns_of_which_nothing_is_known_are_left_out():
    known = {"gpus": 2, "ms": 9.0, "planned_ms": None, "tokens_per_second_per_gpu": 1e3, "tflops": 0.5, "gb": 0.0158}
    known |= {"share_of_product": 0.5, "planned_gb": None, "planned_bubble": 0.0}
    rows = [{"title": "a, DP2", "documented_ms": None, "figures": known}]
    rows += [{"title": "a, TP2", "documented_ms": None, "figures": {"failed": "why <not>"}}]
    table = page._table(rows)
    assert "0.0158" in table and "why &lt;not&gt;" in table and "colspan=6 " in table
    assert "planned" not in table and "documented" not in table and "exposed" not in table
    assert "documented" in page._table([rows[0] | {"documented_ms": 8.0}])


def test_operations_of_a_host_beyond_the_longest_are_one_colour():
    operations = [{"name": f"op{number}", "ms": 30.0 - number} for number in range(30)]
    rows = [{"title": "a", "figures": {"time": {"span": 500.0, "operations": operations}}}]
    (bar,) = page._host_bars(rows)
    assert [name for name, _ in bar.parts] == [*(f"op{number}" for number in range(page.SHOWN)), page.OTHERS]
    assert sum(ms for _, ms in bar.parts) == sum(one["ms"] for one in operations)
