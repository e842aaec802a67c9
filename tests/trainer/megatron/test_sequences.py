"""Training gets from token files what Megatron-Bridge's own datasets give it from text, and writes nothing there."""

import json

import numpy as np

from trainer.data import indexed
from trainer.data.tokens import tokenizer


def compared(result) -> dict:
    assert result.code == 0, result.output
    return json.loads(next(line for line in result.output.splitlines() if line.startswith('{"keys"')))


def test_batches_are_those_of_bridge_s_dataset(configure, ranks, work):
    run = configure("llama", f"paths.output={work}/batches", "train.validate_every=1", "data.seq_length=256")
    found = compared(ranks("batches", run))
    assert found["keys"] == ["attention_mask", "labels", "loss_mask", "position_ids", "token_count", "tokens"]
    assert found["batches"] == 2 * (16 + 2 + 2 + 2)  # two ranks; an epoch of 64 rows, of 8 rows, and two batches more


def test_packs_are_read_without_anything_beside_them(configure, ranks, work):
    run = configure(
        "llama", f"paths.output={work}/packs", "train.validate_every=1", "data.seq_length=256", "data.packed=true",
        "train.global_batch=2",
    )  # fmt: skip
    assert compared(ranks("batches", run))["packs"] > 8


def test_texts_are_trained_on(configure, ranks, base, work):
    base("llama")
    place = work / "texts-prepared"
    place.mkdir()
    random = np.random.default_rng(0)
    counts = {"training": 40, "validation": 6, "test": 0}
    for split in ("training", "validation"):
        lengths = random.integers(5, 200, counts[split]).astype(np.int32)
        ids = np.concatenate([np.append(np.arange(5, n + 4) % 300, 0) for n in lengths]).astype(np.int32)
        indexed.write(place / split, [(ids, lengths)], 512)
    facts = {"kind": "text", "files": {}, "settings": {}, "sources": [], "vocab_size": 512, "pad_id": 0}
    facts |= {"tokenizer": tokenizer.digest(work / "llama"), "rows": counts, "sequences": counts}
    (place / "prepared.json").write_text(json.dumps(facts))
    before = sorted(place.rglob("*"))
    run = configure(
        "llama", f"paths.output={work}/texts", f"paths.data={place}", "train.validate_every=3",
        "train.validate_batches=2",
    )  # fmt: skip
    result = ranks("train", run)
    assert result.code == 0, result.output
    losses = [line["lm_loss"] for line in result.metrics if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    assert any(line["kind"] == "validation" for line in result.metrics)
    assert sorted(place.rglob("*")) == before
