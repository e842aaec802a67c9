"""Indexes and token files are, byte for byte, those that Megatron-Bridge and megatron-core write."""

import json

import numpy as np
import pytest

from trainer.data import indexed


@pytest.mark.parametrize("rows", [1, 2, 300])
def test_index_of_json_lines(rows, tmp_path, as_bridge):
    lines = [json.dumps({"input": "ü" * (i % 7), "output": "\n\u2028"}, ensure_ascii=False) + "\n" for i in range(rows)]
    data = "".join(lines).encode()
    for folder in ("own", "bridge"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "training.jsonl").write_bytes(data)
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    indexed.write_lines(tmp_path / "own/training.jsonl", newlines)
    found = as_bridge(tmp_path, "index", jsonl="bridge/training.jsonl")
    assert found == [json.loads(line) for line in lines]
    for name in ("training.jsonl.idx.npy", "training.jsonl.idx.info"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "bridge" / name).read_bytes()
    assert as_bridge(tmp_path, "index", jsonl="own/training.jsonl") == found


@pytest.mark.parametrize("vocabulary", [512, 65499, 65500, 151552])
def test_token_files_of_documents(vocabulary, tmp_path, as_bridge):
    random = np.random.default_rng(0)
    documents = [random.integers(0, vocabulary, n).tolist() for n in (5, 1, 300, 0, 17)]
    as_bridge(tmp_path, "indexed", prefix="core", documents=documents, vocab_size=vocabulary)
    batches = [documents[:2], [], documents[2:]]
    indexed.write(tmp_path / "own", map(batch, batches), vocabulary)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"own.{suffix}").read_bytes() == (tmp_path / f"core.{suffix}").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("own*")) == ["own.bin", "own.idx"]


def batch(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    ids = [np.array(document, np.int32) for document in documents]
    return np.concatenate([np.zeros(0, np.int32), *ids]), np.array([len(part) for part in ids], np.int32)


def test_no_documents(tmp_path, as_bridge):
    as_bridge(tmp_path, "indexed", prefix="core", documents=[], vocab_size=512)
    indexed.write(tmp_path / "own", [], 512)
    assert (tmp_path / "own.idx").read_bytes() == (tmp_path / "core.idx").read_bytes()


def test_gpt_dataset_reads_them(tmp_path, as_bridge):
    """Its samples are the documents in some order, one after another, cut at sequence length."""
    indexed.write(tmp_path / "own", [batch([[i] * 9 + [0] for i in range(1, 41)])], 512)
    found = as_bridge(tmp_path, "gpt_samples", prefix="own", length=20, count=10)
    assert all(len(sample) == 20 for sample in found)
    for sample in found:
        parts = bytes(sample).split(b"\0")
        assert all(len(set(part)) <= 1 for part in parts)
        assert all(len(part) == 9 for part in parts[1:-1])
    assert len({token for sample in found for token in sample}) > 15


def test_an_id_that_the_type_cannot_hold_is_a_defect(tmp_path):
    with pytest.raises(AssertionError):
        indexed.write(tmp_path / "own", [batch([[70000]])], 512)
