"""Released weights as a conversion reads them: infinite numbers and edited files are said by the tensor's name."""

import hashlib
import struct
from math import prod
from pathlib import Path

import pytest
import xxhash

from conf.load import load
from contract.faults import Fault
from tests.support import small_model
from tests.support.small_model import SHARDS, read_shard, write_shard
from trainer import convert
from trainer.weights import released

# What each type calls infinite, minus infinite, not a number, and its largest number.
VALUES = {
    "BF16": ("<H", 0x7F80, 0xFF80, 0x7FC1, 0x7F7F),
    "F16": ("<H", 0x7C00, 0xFC00, 0x7E01, 0x7BFF),
    "F32": ("<I", 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F7FFFFF),
    "F64": ("<Q", 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, (0x7FF << 52) - 1),
}


@pytest.fixture
def model(tmp_path) -> Path:
    small_model.write(tmp_path / "model")
    return tmp_path / "model"


def with_value(model: Path, dtype: str, value: int) -> str:
    """One number of the second tensor of a shard that holds numbers of this type alone. Returns the tensor's name."""
    header, _ = read_shard(model / SHARDS[0])
    width, at, entries = struct.calcsize(VALUES[dtype][0]), 0, {}
    for name, entry in header.items():
        count = prod(entry["shape"])
        entries[name] = entry | {"dtype": dtype, "data_offsets": [at, at + count * width]}
        at += count * width
    name = list(entries)[1]
    content = bytearray(at)
    struct.pack_into(VALUES[dtype][0], content, entries[name]["data_offsets"][1] - width, value)
    write_shard(model / SHARDS[0], entries, bytes(content))
    return name


@pytest.mark.parametrize("dtype", VALUES)
def test_a_tensor_that_holds_an_infinite_number_is_named_and_not_converted(model, dtype):
    for value in VALUES[dtype][1:4]:
        name = with_value(model, dtype, value)
        with pytest.raises(Fault, match=f"^{model}: 1 tensors hold numbers that are infinite or not .*: {name}; down"):
            convert._checksums(released.read(model), {})


@pytest.mark.parametrize("dtype", VALUES)
def test_the_largest_number_is_finite(model, dtype):
    name = with_value(model, dtype, VALUES[dtype][4])
    assert name in convert._checksums(released.read(model), {})


def test_checksums_are_of_the_kind_that_is_recorded(model):
    """Bases of earlier versions have SHA-256, and are compared by it."""
    found = released.read(model)
    fresh, _ = released.checksums(found, found.tensors)
    first, *others = found.tensors
    entry = found.tensors[first]
    content = (model / entry.file).read_bytes()[entry.start : entry.start + entry.size]
    old = hashlib.sha256(content).hexdigest()
    assert fresh[first] == xxhash.xxh3_128_hexdigest(content)
    assert released.checksums(found, found.tensors, {first: old})[0] == fresh | {first: old}
    for recorded in (old, fresh[first]):
        assert released.has_sum(model / entry.file, entry, recorded)
        assert not released.has_sum(model / found.tensors[others[0]].file, found.tensors[others[0]], recorded)


def test_a_config_json_that_transformers_does_not_take_is_one_line_with_its_reason():
    """Bridge takes any error for one of the network."""
    from trainer.megatron.model import _cause

    error = OSError("network issues")
    error.__cause__ = ValueError("head_dim: no\nint")
    assert _cause(error) == "head_dim: no int"


def test_norms_over_all_heads_are_cut_as_keys_are():
    from conf.model_facts import facts_from_hf
    from conf.rules.layout import problems

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4}
    config = small_model.CONFIG | {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"} | heads
    run = load("tiny", ["layout.tp=2", "layout.sp=true", "layout.gpus_per_node=2"])
    assert not problems(run, facts_from_hf(config))
    (found,) = problems(run, facts_from_hf(config | {"num_key_value_heads": 1}))
    assert found.startswith("layout.tp: 2, but keys are normed over all 1 heads, which it does not divide")
