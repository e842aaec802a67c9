"""Damage that hypothesis draws: in a model's files, a converted model, prepared data, a run's YAML and its paths."""

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.support import small_model
from tests.support.damage import Become, Cut, Drop, Flip, Raw, Say, Set, Twice
from tests.support.small_model import SHARDS

CONFIG, INDEX, TOKENIZER, SETTINGS, SPECIAL = (
    f"model/{name}"
    for name in (
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    )
)
SHARD, OTHER = (f"model/{name}" for name in SHARDS)
MARK, SOURCE, PREPARED, ROWS = "base/complete.json", "base/source.json", "data/prepared.json", "data/test.jsonl"
RUN = "run.yaml"
JSON = (CONFIG, INDEX, TOKENIZER, SETTINGS, SPECIAL, SHARD, MARK, SOURCE, PREPARED)
FILES = (*JSON, OTHER, ROWS, RUN, "model", "base", "data")

YAML = {
    "name": "damaged",
    "model": {"source": "model"},
    "data": {"seq_length": 64},
    "layout": {"gpus_per_node": 1},
    "hardware": {"gpu": "h100"},
    "adapter": {"rank": 8, "targets": ["linear_qkv", "linear_proj"]},
    "train": {"steps": 4, "global_batch": 2, "precision": "bf16"},
    "optimizer": {"lr": 0.001},
    "checkpoint": {"save_every": 2},
    "evaluate": {"tasks": ["held_out"]},
}


def places_in(value: Any, depth: int = 3) -> Iterator[tuple[str | int, ...]]:
    yield ()
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner if depth else ():
        yield from ((key, *rest) for rest in places_in(one, depth - 1))


EMBEDDING, NORM = "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"  # the first of the first shard
HEADER, _ = small_model.tensors({EMBEDDING: (48, 16), NORM: (16,)})
KNOWN: dict[str, Any] = {
    CONFIG: small_model.CONFIG
    | dict.fromkeys(
        (
            "quantization_config",
            "auto_map",
            "rope_scaling",
            "num_nextn_predict_layers",
            "first_k_dense_replace",
            "kv_lora_rank",
            "n_routed_experts",
            "mlp_only_layers",
            "decoder_sparse_step",
            "sliding_window",
            "torch_dtype",
            "id2label",
            "to_dict",
        )
    ),
    INDEX: {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(HEADER, SHARDS[0])},
    TOKENIZER: small_model.tokenizer() | {"truncation": None, "normalizer": None},
    SETTINGS: small_model.settings() | {"chat_template": "x", "unk_token": None, "additional_special_tokens": ["a"]},
    SPECIAL: {"eos_token": "a", "pad_token": {"content": "b"}},
    SHARD: {**HEADER, "__metadata__": {"format": "pt"}},
    MARK: {"files": {"weights": 29}, "digest": "0", "stamps": {}, "left_out": [], "tensors": 1, "precision": "bf16"},
    SOURCE: {"model.norm.weight": ["BF16", [16], "0"]},
    PREPARED: {
        "kind": "sft",
        "files": {"training.jsonl": {"size": 1, "sha256": "0"}},
        "settings": {"seq_length": 64},
        "sources": [{"files": [{"path": "a", "size": 1, "sha256": "0"}]}],
        "tokenizer": "0",
        "rows": {"training": 4},
        "sequences": {"training": 4, "validation": 4},
        "vocab_size": 48,
        "pad_id": 0,
    },
    RUN: YAML,
}
ODD = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 2, 2**24, 2**31, 2**63, 2**64, -(2**63), 10**26, 10**300, 0.5, 1e-300, 1e300),
        *(float("nan"), float("inf"), float("-inf"), "", "x", "a/b", "../x", "/etc/passwd", "x" * 300, "\0", "\ud800"),
        *("NaN", "1", "null", "a\nb", [], {}, [[]], [None], ["x"] * 3, [1, 2], {"a": {}}, {"": 1}, {"0": "x"}),
    ]
)
SECTIONS = st.dictionaries(st.text(max_size=5), ODD | st.lists(ODD, max_size=3), max_size=3)
VALUES = ODD | st.lists(ODD | SECTIONS, max_size=3) | SECTIONS
DEEP = [b"[" * 200_000, b'{"a":' * 200_000, b"[" * 900 + b"]" * 900]
TEXTS = [
    *(
        b"",
        b"\0",
        b"{}",
        b"[]",
        b"null",
        b"<html>",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b"\x80" * 99,
        b"{" * 3,
        b'"x"',
        b"7",
    ),
    *(b'{"a": 1e999}', b'{"a": NaN}', b'{"a": ' + b"9" * 5000 + b"}", b'{"\\ud800": 1}', b"{}" * 2, *DEEP),
]
NESTED = "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)
YAMLS = [
    *(
        b"a: *b",
        b"&a [*a]",
        b"? {a: b}\n: c",
        b"\ta: b",
        b"a: !!int ''",
        b"a: !!python/object:os.system x",
        b"--- a\n--- b",
    ),
    *(b"a: !!float x", b"a: !!binary =", b"a: !!timestamp x", b"%YAML 9.9\n---\na: b", b"a: 'b", b"1: 2", b"null: 3"),
    *(b"train: &a {steps: 1}\noptimizer: *a", b"a: !!set {b}", b"a: |\n b", b"!!str a: b", b"<<: {a: b}", b"a: \xff"),
    *(b"layout: auto", b"layout: [auto]", b"name: 7", b"name: !!str", b"~: ~", b"[a: b]", b"paths: {model: ~}"),
    ("a: &a [1]\n" + NESTED).encode(),
    b"a: &a {x: 1}\nb: {!!merge <<: [" + b", ".join([b"*a"] * 99) + b"]}",
    b"evaluate: {tasks: &a [*a]}",
]
PATHS = ["model", "base", "data", "output", "logs", "export", "served", "parity", "evaluation"]
NAMES = [
    "x" * 256,
    "x/" * 2050,
    "a\0b",
    "",
    "run.yaml/x",
    "model/config.json",
    ".",
    "..",
    "~none/x",
    "ä\u202e",
    " ",
    "a\nb",
]
KEYS = [
    "train.steps",
    "train.global_batch",
    "adapter.rank",
    "adapter.targets",
    "layout.tp",
    "layout.pp",
    "layout.nodes",
]
KEYS += [
    "data.source",
    "data.mixture",
    "data.template",
    "data.seq_length",
    "model.source",
    "hardware.gpu",
    "export.formats",
]
KEYS += [
    "evaluate.tasks",
    "evaluate.rows",
    "checkpoint.keep",
    "gang.retries",
    "train.micro_batch",
    "name",
    "optimizer.lr",
]


def in_json(file: str) -> st.SearchStrategy:
    keys = st.sampled_from([*places_in(KNOWN[file])])
    inside = keys.filter(bool)
    tops = st.sampled_from([*KNOWN[file]])
    new = st.builds(Set, st.just(file), st.tuples(st.text(max_size=8)), VALUES)
    return st.one_of(
        st.builds(Set, st.just(file), keys, VALUES),
        st.builds(Set, st.just(file), inside, VALUES),
        st.builds(Drop, st.just(file), inside),
        st.builds(Twice, st.just(file), tops, VALUES),
        new,
    )


def as_override(key: str, value: Any) -> Say:
    return Say(f"{key}={json.dumps(value)}")


DAMAGE = st.one_of(
    st.sampled_from(JSON).flatmap(in_json),
    in_json(CONFIG),
    in_json(SHARD),
    in_json(RUN),
    st.builds(Raw, st.sampled_from(JSON), st.sampled_from(TEXTS) | st.binary(max_size=40)),
    st.builds(Raw, st.just(RUN), st.sampled_from(YAMLS + TEXTS) | st.binary(max_size=40)),
    st.builds(Flip, st.sampled_from((*JSON, OTHER, RUN)), st.floats(0, 1), st.integers(0, 7)),
    st.builds(Flip, st.just(SHARD), st.floats(0, 0.2), st.integers(0, 7)),
    st.builds(Cut, st.sampled_from((*JSON, OTHER, RUN)), st.floats(0, 1)),
    st.builds(
        Become,
        st.sampled_from(FILES),
        st.sampled_from(["FIFO", "folder", "loop", "nothing", "device", "null", "empty", "unreadable", "huge", "gone"]),
    ),
    st.builds(as_override, st.sampled_from([f"paths.{name}" for name in PATHS]), st.sampled_from(NAMES)),
    st.builds(as_override, st.sampled_from(KEYS), VALUES | st.sampled_from(NAMES)),
)
