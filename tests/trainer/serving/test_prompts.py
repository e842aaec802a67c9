"""Rows that a model is asked about: their texts and tokens are those that training has, of whatever kind they are."""

import json
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from conf.load import load
from conf.schema.run import Run
from contract.faults import Fault
from tests.support import data_folders
from trainer import prepare
from trainer.serving import held_out, prompts

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {i} + 1?"},
            {"role": "assistant", "content": f"It is {i + 1}."},
        ]
    }
    for i in range(40)
]


@pytest.fixture
def run(tmp_path):
    """run(family, *overrides) -> a run whose data are prepared"""

    def run(family: str, *overrides: str) -> Run:
        model = data_folders.make(tmp_path / family, family)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
        (tmp_path / "conf.yaml").write_text(
            "name: test\nmodel: {source: none}\ntrain: {steps: 1, global_batch: 1}\n"
            "optimizer: {lr: 1e-3}\ncheckpoint: {save_every: 1}\n"
            "evaluate: {rows: 5}\n"
            f"data: {{source: {tmp_path}/rows.jsonl, seq_length: 128, test: 0.5, validation: 0.2, processes: 1}}\n"
        )
        paths = [f"paths.{name}={tmp_path}/{name}" for name in ("data", "output")]
        found = load(tmp_path / "conf.yaml", [f"paths.model={model}", f"paths.served={model}", *paths, *overrides])
        prepare.main(found)
        return found

    return run


@pytest.mark.parametrize("family", ["chatml", "qwen3", "glm", "tagged", "llama3", "plain"])
def test_prompts_answers_and_tokens(family, run):
    made = run(family, *(["data.stop=<|user|>"] if family == "glm" else []))
    test = held_out.read(made)
    assert len(test.rows) == 5
    tokenizer = prompts.template(made, made.paths.served).tokenizer
    for row in test.rows:
        assert tokenizer.decode(row.prompt_ids) == row.prompt
        assert tokenizer.decode(row.learned_ids) == row.learned
        assert row.accepted[0].startswith("It is ")
        assert row.accepted[0] in row.accepted[1] and row.learned.startswith(row.accepted[1])
        assert held_out.is_right(row.accepted[1] + "\n", row.accepted) and held_out.is_right(
            row.accepted[0], row.accepted
        )
        assert not held_out.is_right("It is 99999.", row.accepted)
    assert test.until == (["<|user|>"] if family == "glm" else [])


def test_a_call_of_a_tool_is_an_answer(run):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    made = run("tagged")
    line = json.dumps({"messages": [CHATS[0]["messages"][0], answer]})
    (Path(made.paths.data) / "test.jsonl").write_text(line + "\n")
    (row,) = held_out.read(made).rows
    called = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert row.accepted == (called, called) and row.learned == called + "<|im_end|>"
    assert not held_out.is_right("", row.accepted)


@pytest.mark.parametrize("family", ["chatml", "qwen3", "plain"])
def test_they_are_the_tokens_of_the_token_files(family, run):
    made = run(family)
    template = prompts.template(made, made.paths.model)
    rows = prompts.read(Path(made.paths.data) / "training.jsonl", None)
    table = parquet.read_table(Path(made.paths.data) / "training.idx.parquet").to_pydict()
    assert len(rows) == len(table["input_ids"])
    for row, ids in zip(rows, table["input_ids"], strict=True):
        prompt, answer = template.tokens(row)
        assert prompt + answer == list(ids)[: len(prompt) + len(answer)]


def test_what_is_not_prepared_or_of_another_run_is_refused(run, tmp_path):
    made = run("chatml")
    other = made.model_copy(update={"paths": made.paths.model_copy(update={"data": str(tmp_path / "elsewhere")})})
    with pytest.raises(Fault, match=r"paths.data: .*no prepared.json; python -m trainer.prepare"):
        prompts.template(other, made.paths.model)
    record = Path(prompts.folder(made)) / prompts.RECORD
    record.write_text("{")
    with pytest.raises(Fault, match=r"template.json: .* writes it again"):
        prompts.template(made, made.paths.model)
