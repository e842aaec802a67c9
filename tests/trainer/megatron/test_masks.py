"""The loss covers the answer and its end, to the token, and nothing else."""

import json

import pytest
from tokenizers import Tokenizer


@pytest.mark.parametrize("template", ["{input} {output}", "Q: {input}\nA: {output}"])
@pytest.mark.parametrize("loss_on", ["answer", "all"])
def test_every_token(template, loss_on, configure, ranks, work):
    run = configure(
        "llama", f"paths.output={work}/masks", "data.seq_length=256", f"data.loss_on={loss_on}",
        f"data.template={json.dumps(template)}",
    )  # fmt: skip
    result = ranks("masks", run)
    assert result.code == 0, result.output
    found = [json.loads(line) for line in result.output.splitlines() if line.startswith('{"tokens"')]
    rows = [json.loads(line) for line in (work / "data" / "training.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.from_file(f"{run.paths.model}/tokenizer.json")
    end = json.loads((work / "llama" / "config.json").read_text())["eos_token_id"]
    assert len(found) == 8
    for row, seen in zip(rows, found, strict=False):
        answer = [*tokenizer.encode(" " + row["output"], add_special_tokens=False).ids, end]
        length = seen["labels"].index(end) + 1
        whole = [seen["tokens"][0], *seen["labels"][:length]]
        text = tokenizer.decode(whole[:-1], skip_special_tokens=False)
        assert text == template.format(input=row["input"].strip(" "), output=row["output"].strip(" "))
        assert seen["tokens"][1:length] == seen["labels"][: length - 1]
        assert seen["labels"][length - len(answer) : length] == answer
        counted = len(answer) if loss_on == "answer" else length
        expected = [0.0] * (length - counted) + [1.0] * counted + [0.0] * (len(seen["labels"]) - length)
        assert [float(value) for value in seen["loss_mask"]] == expected
