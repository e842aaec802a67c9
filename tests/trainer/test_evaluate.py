"""Real vLLM on a tiny model: trained, exported and served once; what it is asked, what it answers, what it refuses."""

import json
import math
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{input}}}}"
doc_to_target: 0
doc_to_choice: ["{{{{output}}}}", "no"]
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def trained(configure, ranks, base, work, short_rows):
    """A run after six steps, exported. Its parity prompts are its held-out rows, all of them short."""
    base("glm4-moe")
    data = short_rows(work / "evaluated-data")
    output = work / "evaluated"
    task = output / "sums.yaml"
    output.mkdir()
    task.write_text(TASK.format(file=data / "test.jsonl"))
    run = configure(
        "glm4-moe",
        f"paths.data={data}",
        f"paths.output={output}",
        f"paths.parity={output}/parity.json",
        f"paths.export={output}/export",
        f"paths.served={output}/export/merged",
        f"paths.evaluation={output}/evaluation",
        f"evaluate.tasks=[held_out, {task}]",
        "evaluate.rows=8",
        "evaluate.samples=3",
        "evaluate.max_tokens=8",
    )
    for command in ("train", "export"):
        result = ranks(command, run)
        assert result.code == 0, result.output
    return run


@pytest.fixture(scope="module")
def evaluated(trained, evaluate, tmp_path_factory):
    result = evaluate(trained, tmp_path_factory.mktemp("evaluated"))
    assert result.code == 0, result.errors
    return result


def test_the_served_model_is_the_trained_one(evaluated):
    parity = evaluated.results["parity"]
    assert parity["ok"] and parity["prompts"] == 8 and parity["step"] == 6
    assert parity["mean"] <= parity["max"] < 1e-4 < parity["bound"]
    assert abs(parity["lost"]["share"]) < 1e-4 and parity["lost"]["effect"] > 0.1
    said = "evaluate: parity: 8 prompts of "
    assert [line.startswith(said) for line in evaluated.output.splitlines() if "parity" in line].count(True) == 1


def test_held_out_likelihood_is_that_of_training_for_the_answers_tokens(evaluated, trained):
    """Which it can only be if prompts and answers are the same tokens as in training."""
    tokenizer = Tokenizer.from_file(f"{trained.paths.served}/tokenizer.json")
    rows = [json.loads(line) for line in (Path(trained.paths.data) / "test.jsonl").read_text().splitlines()]
    recorded = json.loads(Path(trained.paths.parity).read_text())["rows"]
    answers = []
    for row, found in zip(rows[:8], recorded, strict=True):
        prompt = tokenizer.encode(row["input"]).ids
        answer = tokenizer.encode(f" {row['output']}<|endoftext|>").ids
        assert found["tokens"] == prompt + answer
        answers += found["log_probs"][-len(answer) :]
    metrics = evaluated.results["metrics"]
    assert metrics["held_out/log_likelihood"] == pytest.approx(sum(answers) / len(answers), abs=1e-5)
    assert metrics["held_out/perplexity"] == pytest.approx(math.exp(-metrics["held_out/log_likelihood"]))


def test_results_hold_metrics_rows_and_samples(evaluated):
    results = evaluated.results
    assert results["rows"] == {"held_out": 8, "sums": 8}
    assert 0 <= results["metrics"]["held_out/exact_match"] <= 1
    assert 0 <= results["metrics"]["sums/acc"] <= 1
    assert [len(samples) for samples in results["samples"].values()] == [3, 3]
    sample = results["samples"]["held_out"][0]
    assert sample.keys() == {"prompt", "answer", "reference", "correct"}
    assert sample["correct"] == (sample["answer"].strip() == sample["reference"])
    assert not sample["prompt"].endswith(" ")
    assert len(results["chat_template"]) == 64
    assert results["versions"]["vllm"].startswith("0.26")


def test_scores_of_rows_make_up_the_metrics(evaluated):
    scores, metrics = json.loads((evaluated.folder / "scores.json").read_text()), evaluated.results["metrics"]
    assert {"held_out/exact_match", "held_out/log_likelihood", "held_out/perplexity", "sums/acc"} <= scores.keys()
    for name, rows in scores.items():
        mean = sum(total for total, _ in rows) / sum(count for _, count in rows)
        value = math.exp(-mean) if name == "held_out/perplexity" else mean
        assert len(rows) == 8 and metrics[name] == pytest.approx(value), name


def test_people_and_programs_see_progress_and_not_what_vllm_prints(evaluated):
    lines = [json.loads(line) for line in (evaluated.folder / "progress.jsonl").read_text().splitlines()]
    assert {"done": 8, "total": 8, "what": "held_out answers"} in lines
    assert all(line.startswith("evaluate: ") for line in evaluated.output.splitlines())
    assert "held_out answers: 8 of 8 rows" in evaluated.output
    assert evaluated.errors == ""
    assert "Initializing a V1 LLM engine" in (evaluated.folder / "log.txt").read_text()


def test_a_model_without_the_adapter_is_not_taken_for_the_trained_one(trained, evaluated, evaluate, tmp_path):
    paths = {"served": trained.paths.model, "evaluation": str(tmp_path / "evaluation")}
    base = trained.model_copy(update={"paths": trained.paths.model_copy(update=paths)})
    result = evaluate(base.model_copy(update={"evaluate": base.evaluate.model_copy(update={"rows": 1})}), tmp_path)
    assert result.code == 2
    assert "error: parity: the served model is not the trained one of step 6" in result.errors
    assert "the bound is 0.001 (evaluate.parity_bound); " in result.errors
    assert "of the adapter's effect is lost, the bound is 1%; worst" in result.errors
    assert result.errors.count("\n") == 1
    assert result.results["parity"]["ok"] is False
    assert result.results["parity"]["mean"] > 0.001


def test_a_missing_record_of_what_training_says_ends_the_evaluation_of_an_export(trained, evaluate, tmp_path):
    """Before anything is loaded. The export's mark says that there is one."""
    paths = {"parity": str(tmp_path / "parity.json"), "evaluation": str(tmp_path / "evaluation")}
    result = evaluate(trained.model_copy(update={"paths": trained.paths.model_copy(update=paths)}), tmp_path)
    assert result.code == 2
    said = f"error: paths.parity: {tmp_path}/parity.json: no such file; {trained.paths.served} was trained to step 6"
    assert said in result.errors
    assert result.errors.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("paths", "served", "/nowhere"), "paths.served: /nowhere: no such folder"),
        (("paths", "data", "/nowhere"), "/nowhere/test.jsonl: no such file"),
        (("evaluate", "tasks", ("mine.yaml",)), "evaluate.tasks: mine.yaml: no such file"),
        (("evaluate", "tasks", ()), "evaluate.tasks: empty"),
    ],
)
def test_faults_are_one_line_before_anything_is_loaded(change, fault, trained, evaluate, tmp_path):
    section, key, value = change
    changed = getattr(trained, section).model_copy(update={key: value})
    result = evaluate(trained.model_copy(update={section: changed}), tmp_path)
    assert result.code == 2
    assert result.errors.startswith(f"error: {fault}")
    assert result.errors.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("test.jsonl", "", "test.jsonl: empty"),
        ("test.jsonl", '{"input": "a", "output": "b"}\n{"input": "a"}\n', "test.jsonl: changed from"),
        ("template.json", None, "not prepared: no template.json; python -m trainer.prepare"),
        ("prepared.json", None, "not prepared: python -m trainer.prepare"),
    ],
)
def test_rows_that_cannot_be_asked_are_named(file, text, fault, trained, evaluate, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(Path(trained.paths.output) / "data", data)
    (data / file).unlink()
    if text is not None:
        (data / file).write_text(text)
    paths = trained.paths.model_copy(update={"data": str(data), "evaluation": str(tmp_path / "evaluation")})
    result = evaluate(trained.model_copy(update={"paths": paths}), tmp_path)
    assert result.code == 2
    assert fault in result.errors
    assert result.errors.count("\n") == 1


def test_another_tokenizer_than_the_one_that_was_trained_with_is_noticed(trained, evaluate, tmp_path):
    served = tmp_path / "served"
    shutil.copytree(trained.paths.served, served)
    (served / "chat_template.jinja").write_text("{{ messages }}")
    with (served / "tokenizer.json").open("a") as f:
        f.write(" ")
    paths = trained.paths.model_copy(update={"served": str(served), "evaluation": str(tmp_path / "evaluation")})
    result = evaluate(trained.model_copy(update={"paths": paths}), tmp_path)
    assert result.code == 2
    assert f"error: {served}: tokenizer.json is not the file with which the data were prepared" in result.errors
    assert result.errors.count("\n") == 1


def test_a_broken_engine_shows_the_last_lines_of_its_log(trained, evaluate, tmp_path):
    """Its files are right; no engine knows its architecture."""
    served = tmp_path / "served"
    served.mkdir()
    for file in Path(trained.paths.served).iterdir():
        (served / file.name).symlink_to(file)
    config = json.loads((served / "config.json").read_text())
    (served / "config.json").unlink()
    (served / "config.json").write_text(json.dumps(config | {"architectures": ["NobodysModel"]}))
    paths = {"served": str(served), "evaluation": str(tmp_path / "evaluation")}
    result = evaluate(trained.model_copy(update={"paths": trained.paths.model_copy(update=paths)}), tmp_path)
    assert result.code == 1
    assert "NobodysModel" in result.errors
    assert f"the last of {tmp_path}/evaluation/log.txt" in result.errors
    assert result.results is None
