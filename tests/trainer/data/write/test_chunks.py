"""A chunk of rows of any kind: each row is kept whole or counted with its reason, and none stops the others."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.schema.data import Data
from contract.faults import Fault
from trainer.data.read import shapes, sources
from trainer.data.tokens import templates, tokenizer
from trainer.data.write import chunks
from trainer.data.write.spool import LEARNED, Spool
from trainer.rehearsal import tiny_models

TEXT = st.text(max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": TEXT | VALUES}
    ),
    max_size=4,
)
ROWS = {
    "pairs": st.fixed_dictionaries({"input": TEXT | VALUES}, optional={"output": TEXT | VALUES, "more": VALUES}),
    "messages": st.fixed_dictionaries({}, optional={"messages": MESSAGES | VALUES, "tools": VALUES}),
    "text": st.fixed_dictionaries({"text": TEXT | VALUES}),
}
FIRST = {
    "pairs": {"input": "a", "output": "b"},
    "messages": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "text": {"text": "a"},
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chunks") / "model"
    tiny_models.make_model("glm4-moe", folder)
    return tokenizer.load(folder, trust_remote_code=False)


def plan(kind: str, template: str, tokens, folder: Path) -> chunks.Plan:
    data = Data(seq_length=48, source="rows.jsonl", template=template, bad_rows="drop", too_long="truncate")
    shape = shapes.detect(data.parts[0], [FIRST[kind]], "rows.jsonl:1")
    return chunks.Plan(data, (shape,), (None,), templates.choose(data, tokens, kind), 16, folder)


@pytest.mark.parametrize(
    ("kind", "template"), [("pairs", "{input} {output}"), ("pairs", "chat"), ("messages", "chat"), ("text", "auto")]
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rows(kind, template, tokens, tmp_path, data):
    rows = [FIRST[kind], *data.draw(st.lists(ROWS[kind] | VALUES, max_size=6))]
    file, made = tmp_path / "rows.jsonl", tmp_path / "made.chunk"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    what = plan(kind, template, tokens, tmp_path)
    (chunk,) = sources.chunks(what.data.model_copy(update={"source": str(file)}).parts[0], 0, lambda number: False)
    chunks.encode(what, chunk, made, None)
    spool = Spool([made])
    (facts,) = spool.facts()
    lengths, learned = spool.column("length", np.int32), spool.column("learned", np.int32)
    assert facts["read"] == len(rows)
    assert len(lengths) + sum(entry["count"] for entry in facts["dropped"].values()) == len(rows)
    assert len(lengths) >= 1
    assert (learned > 0).all()
    assert kind == "text" or (lengths <= 48).all()
    found = spool.chunk(0).read("tokens")
    assert (found & ~LEARNED).max() < len(tokens)
    assert np.count_nonzero(found >= LEARNED) == learned.sum()
    lines = spool.chunk(0).read("lines").tobytes().splitlines()
    assert len(lines) == (0 if kind == "text" else len(lengths))
    for line in lines:
        json.loads(line)


def test_the_same_chunk_gives_the_same_bytes(tokens, tmp_path):
    rows = [{"input": f"{n} " * (n % 30 + 1), "output": f"{n}"} for n in range(700)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    what = plan("pairs", "{input} {output}", tokens, tmp_path)
    made = []
    for name in ("one", "two"):
        (chunk,) = sources.chunks(what.data.model_copy(update={"source": str(file)}).parts[0], 0, lambda number: False)
        chunks.encode(what, chunk, tmp_path / name, None)
        made.append((tmp_path / name).read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize("text", ["{{ messages[0].content * 700000000 }}", "{{ input * 700000000 }}{{ output }}"])
def test_a_row_that_the_template_writes_too_much_of_is_named_with_both_files(text, tokens, tmp_path):
    """It ends the preparation, also when bad rows are dropped: the next rows would be as slow."""
    rows = [{"input": value, "output": "b"} for value in ("", "", "c", "")]
    file, own = tmp_path / "rows.jsonl", tmp_path / "own.jinja"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own.write_text(text)
    what = plan("pairs", str(own), tokens, tmp_path)
    (chunk,) = sources.chunks(what.data.model_copy(update={"source": str(file)}).parts[0], 0, lambda number: False)
    with pytest.raises(Fault) as caught:
        chunks.encode(what, chunk, tmp_path / "made.chunk", None)
    assert str(caught.value).startswith(
        f"{file}:3: {own}: the template takes more than 536.9 MB of memory with the row"
    )
