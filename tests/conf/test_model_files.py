"""conf/model_files: each damage of a released model's files is one line that names the file, and never a hang."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf import families
from conf.alternatives import REFUSED
from conf.model_files import safetensors_header
from conf.planner import released_model
from conf.rules.conversion import not_converted
from contract.faults import Fault
from tests.support import small_model
from tests.support.small_model import SHARDS, read_shard, write_shard

INDEX, CONFIG, TOKENIZER, SETTINGS = (
    "model.safetensors.index.json",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "model"
    small_model.write(folder)
    return folder


@pytest.fixture
def model(original, tmp_path) -> Path:
    shutil.copytree(original, tmp_path / "model")
    return tmp_path / "model"


def test_a_whole_model_is_accepted(model):
    config, facts = released_model.check_released(model)
    assert (config["model_type"], facts.layers, facts.experts) == ("qwen3_moe", 2, 4)


def test_every_family_says_which_keys_are_read():
    assert all(family.read and family.architecture for family in families.every().values())


def refused(model: Path) -> str:
    with pytest.raises(Fault) as error:
        released_model.check_released(model)
    text = str(error.value)
    assert "\n" not in text and text.startswith(str(model))
    return text


def change(model: Path, name: str, edit: Callable[[Any], Any]) -> None:
    found = json.loads((model / name).read_text())
    edited = edit(found)
    (model / name).write_text(json.dumps(found if edited is None else edited))


@pytest.mark.parametrize(
    "architecture, reason",
    [
        ("PhimoeForCausalLM", "Megatron-Bridge 0.6 has no bridge for it"),
        ("Ernie4_5_MoeForCausalLM", "Megatron-Bridge 0.6 has a bridge for it, but nobody compared"),
        ("Qwen3VLForConditionalGeneration", "it reads more than text"),
    ],
)
def test_an_architecture_that_is_not_converted_here_is_refused_with_a_reason_and_a_release(model, architecture, reason):
    change(model, CONFIG, lambda config: config | {"architectures": [architecture]})
    line = refused(model)
    assert line.startswith(f"{model}/config.json: {architecture} is not converted or trained here: {reason}")
    assert "the closest supported model with experts is allenai/OLMoE-1B-7B-0924" in line


@pytest.mark.parametrize("name", ["modeling_own.Qwen3MoeForCausalLM", "org/repo--modeling_own.OwnForCausalLM"])
def test_code_of_a_release_is_refused_with_the_true_reason(model, name):
    own = {"auto_map": {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": name}}
    change(model, CONFIG, lambda config: config | own)
    line = refused(model)
    assert f'auto_map names "{name}", code of the release, and only transformers\' Qwen3MoeForCausalLM is' in line
    assert "not yet supported" not in line
    change(model, CONFIG, lambda config: config | {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}})
    released_model.check_released(model)


def test_code_of_a_release_passes_for_families_that_megatron_bridge_knows_by_name():
    config = families.tiny()["deepseek-v3"] | {
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    }
    assert not_converted(config) == ""
    other = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    assert "auto_map" in not_converted(config | other)


def test_a_family_that_is_not_taken_has_a_reason_and_another_to_take(model):
    change(model, CONFIG, lambda config: config | {"architectures": ["GlmMoeDsaForCausalLM"]})
    said = refused(model)
    assert said.startswith(
        f"{model}/config.json: GlmMoeDsaForCausalLM is not converted or trained here: an indexer selects"
    )
    assert "the closest supported model" in said


@pytest.mark.parametrize("architecture", REFUSED)
def test_every_family_that_is_not_taken_is_refused_in_a_line_with_its_reason(model, architecture):
    change(model, CONFIG, lambda config: config | {"architectures": [architecture]})
    said = refused(model)
    assert f"{architecture} is not converted or trained here: {REFUSED[architecture]}" in said and "\n" not in said
    assert not families.named(architecture).architecture and "the closest supported model" in said


@pytest.mark.parametrize("value", ["Qwen3MoeForCausalLM", 3, {"a": 1}, [3], [None], [[]], True])
def test_architectures_that_are_no_list_of_names(model, value):
    change(model, CONFIG, lambda config: config | {"architectures": value})
    assert "architectures is" in refused(model) and "which is not a list of architectures" in refused(model)


@pytest.mark.parametrize(
    "key, value, what",
    [
        ("rms_norm_eps", "x", 'rms_norm_eps is "x", which is not a number above 0 and below 1'),
        ("rms_norm_eps", None, "rms_norm_eps is null, which is not a number above 0 and below 1"),
        ("rms_norm_eps", float("nan"), "NaN is not a JSON number"),
        ("rms_norm_eps", float("-inf"), "-Infinity is not a JSON number"),
        ("rms_norm_eps", float("inf"), 'rms_norm_eps is {"__float__": "Infinity"}, which is not a number above 0'),
        ("num_hidden_layers", 2**24, "num_hidden_layers is 16777216, which is not a size from 1 to 1024"),
        ("num_hidden_layers", 1000, "but the weights have 2 layers"),
        ("moe_intermediate_size", 2**20, "but the weights have"),
        ("hidden_size", 2**20, "but model.embed_tokens.weight is [48, 16]"),
        ("tie_word_embeddings", "no", 'tie_word_embeddings is "no", which is neither true nor false'),
        ("model_type", "llama", 'model_type is "llama", and that of Qwen3MoeForCausalLM is qwen3_moe'),
        ("eos_token_id", [0, 48], "eos_token_id is [0, 48], but vocab_size is 48"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": -1}, "rope_parameters.rope_theta is -1"),
        ("rope_scaling", 7, "rope_scaling is 7, which is not an object"),
    ],
)
def test_a_key_of_config_json_that_is_wrong_is_named(model, key, value, what):
    change(model, CONFIG, lambda config: config | {key: value})
    assert what in refused(model)


@pytest.mark.parametrize(
    "key, value, what",
    [
        ("n_layer", 3, "n_layer is 3, but the weights have 2 layers"),
        ("n_embd", 32, "vocab_size is 48 and n_embd 32, but transformer.wte.weight is [48, 16]"),
    ],
)
def test_gpt2_has_names_of_its_own(tmp_path, key, value, what):
    small_model.write(tmp_path / "model", small_model.GPT2)
    assert released_model.check_released(tmp_path / "model")[1].layers == 2
    change(tmp_path / "model", CONFIG, lambda config: config | {key: value})
    assert refused(tmp_path / "model").endswith(what)


@pytest.mark.parametrize(
    "text, what",
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"vocab_size": 48, "vocab_size": 49}', 'the key "vocab_size" occurs twice'),
        (b'{"a": 1e999}', "the number 1e999 is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is too large"),
        (b'{"a": "\xff"}', "its text is not UTF-8"),
        (b'{"a": "\\ud800"}', "its text is not UTF-8"),
        (b"\xff\xfe{\x00}\x00", "its text is not UTF-8"),
        (b"[]", "contains a list, not an object"),
        (b"", "not readable as JSON"),
    ],
)
def test_json_that_only_python_would_read_is_refused(model, text, what):
    for name in (CONFIG, INDEX, TOKENIZER, SETTINGS):
        before = (model / name).read_bytes()
        (model / name).write_bytes(text)
        assert what in refused(model) and name in refused(model)
        (model / name).write_bytes(before)


def entry(header: dict[str, Any], **changes: Any) -> dict[str, Any]:
    name = next(iter(header))
    return {**header, name: {**header[name], **changes}}


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no dtype": (lambda h: entry(h, dtype=None), "dtype is null"),
    "unknown dtype": (lambda h: entry(h, dtype="F33"), 'dtype is "F33"'),
    "dtype list": (lambda h: entry(h, dtype=["BF16"]), 'dtype is ["BF16"]'),
    "text as shape": (lambda h: entry(h, shape="48,16"), 'shape is "48,16", which is not a list of sizes'),
    "texts in shape": (lambda h: entry(h, shape=["48", "16"]), "which is not a list of sizes"),
    "negative size": (lambda h: entry(h, shape=[-48, -16]), "which is not a list of sizes"),
    "half a size": (lambda h: entry(h, shape=[48.0, 16.0]), "which is not a list of sizes"),
    "truth as size": (lambda h: entry(h, shape=[True, 768]), "which is not a list of sizes"),
    "other shape": (lambda h: entry(h, shape=[48, 15]), "does not match its bytes"),
    "deep shape": (lambda h: entry(h, shape=[1] * 99), "which is not a list of sizes"),
    "huge shape": (lambda h: entry(h, shape=[2**62] * 64), "does not match its bytes"),
    "no offsets": (lambda h: {name: {"dtype": "BF16", "shape": [1]} for name in h}, "its entry lacks dtype"),
    "one offset": (lambda h: entry(h, data_offsets=[0]), "which are not a beginning and an end"),
    "offsets backwards": (lambda h: entry(h, data_offsets=[9, 0]), "which are not a beginning and an end"),
    "text as offset": (lambda h: entry(h, data_offsets=["0", "1536"]), "which are not a beginning and an end"),
    "entry is a list": (lambda h: {**h, "more": []}, "its entry lacks dtype"),
    "metadata holds a list": (lambda h: {**h, "__metadata__": {"format": []}}, "__metadata__ contains values"),
    "metadata is a text": (lambda h: {**h, "__metadata__": "pt"}, "__metadata__ contains values"),
    "a list": (lambda h: [h], "contains a list, not an object"),
    "brackets": (lambda h: b"[" * 200_000, "nested too deeply"),
    "not JSON": (lambda h: b"<html>", "not readable as JSON"),
    "a name twice": (
        lambda h: json.dumps(h).encode().replace(b"{", b'{"%s": 1,' % next(iter(h)).encode(), 1),
        "occurs twice",
    ),
}


@pytest.mark.parametrize("damage", HEADERS)
def test_a_safetensors_header_that_is_wrong_is_one_line(model, damage):
    edit, what = HEADERS[damage]
    header, content = read_shard(model / SHARDS[0])
    write_shard(model / SHARDS[0], edit(header), content)
    assert what in refused(model) and SHARDS[0] in refused(model)


def test_tensors_that_overlap_or_leave_a_gap_or_a_rest_are_refused(model):
    path = model / SHARDS[0]
    header, content = read_shard(path)
    first, second, *_ = header
    begin, end = header[second]["data_offsets"]
    write_shard(path, {**header, second: {**header[second], "data_offsets": [begin - 2, end - 2]}}, content)
    assert f'tensor "{second}" overlaps tensor "{first}"' in refused(model)
    write_shard(path, {name: value for name, value in header.items() if name != second}, content)
    assert f'leaves a gap after tensor "{first}"' in refused(model)
    write_shard(path, header, content + b"\0\0")
    assert "longer than it should be" in refused(model)
    write_shard(path, header, content[:-2])
    assert "truncated" in refused(model)


def test_a_header_larger_than_the_library_takes_is_not_read(model):
    with (model / SHARDS[0]).open("wb") as file:
        file.write((2 * 10**8).to_bytes(8, "little"))
        file.truncate(3 * 10**8)  # a hole: no disk is used
    assert "200000000 bytes long" in refused(model)


@pytest.mark.parametrize("kind", ["FIFO", "folder", "loop", "nothing", "device"])
@pytest.mark.parametrize("name", [SHARDS[1], CONFIG, INDEX, TOKENIZER, SETTINGS])
@pytest.mark.timeout(100)
def test_what_is_no_file_is_not_waited_for(model, kind, name):
    (model / name).unlink()
    if kind == "device":
        (model / name).symlink_to("/dev/zero")
    elif kind in ("loop", "nothing"):
        (model / name).symlink_to(name if kind == "loop" else "nowhere")
    else:
        (os.mkfifo if kind == "FIFO" else os.mkdir)(model / name)
    assert name in refused(model)


@pytest.mark.parametrize(
    "listed, what",
    [
        (3, "lies in 3, which is not a name of a file in this folder"),
        ("", 'lies in "", which is not a name'),
        ("../model.safetensors", "which is not a name of a file in this folder"),
        ("/etc/passwd", "which is not a name of a file in this folder"),
        ("a\\b", "which is not a name of a file in this folder"),
        ("x" * 300, "which is not a name of a file in this folder"),
        ("a\0b", "which is not a name of a file in this folder"),
        ("other.safetensors", "1 of the 3 shards in model.safetensors.index.json are missing: other.safetensors"),
        (SHARDS[1], "which model.safetensors.index.json does not list there"),
    ],
)
def test_an_index_that_names_something_else_is_refused(model, listed, what):
    name = next(iter(read_shard(model / SHARDS[0])[0]))
    change(model, INDEX, lambda index: {"weight_map": index["weight_map"] | {name: listed}})
    assert what in refused(model)


@pytest.mark.parametrize("weight_map", [None, {}, [], 7, "x"])
def test_an_index_without_a_map_is_refused(model, weight_map):
    change(model, INDEX, lambda index: {"weight_map": weight_map})
    assert f"{INDEX}: weight_map is missing, or not an object" in refused(model)


def test_an_index_and_its_shards_have_the_same_tensors(model):
    change(model, INDEX, lambda index: {"weight_map": index["weight_map"] | {"more": SHARDS[0]}})
    assert refused(model) == f'{model}/{INDEX}: lists "more", which the files lack'
    change(model, INDEX, lambda index: index["weight_map"].pop(NORM) and index["weight_map"].pop("more") and None)
    assert f'holds "{NORM}", which {INDEX} does not list there' in refused(model)


@pytest.mark.parametrize(
    "name, edit, what",
    [
        (TOKENIZER, lambda found: found | {"model": None}, "model is null, which is not an object"),
        (TOKENIZER, lambda found: found | {"model": []}, "model is [], which is not an object"),
        (TOKENIZER, lambda found: found["model"].update(vocab=None), "model.vocab is null, which is not a vocabulary"),
        (TOKENIZER, lambda found: found["model"]["vocab"].update(a={}), 'the id of "a" is {}, which is not an id'),
        (TOKENIZER, lambda found: found["model"]["vocab"].update(a=48), "token id 48 does not fit the model"),
        (TOKENIZER, lambda found: found["model"].update(vocab=[["a", "b"]]), "is not a text with its score"),
        (TOKENIZER, lambda found: found["model"].update(merges=[["a", 1]]), "model.merges is not a list of pairs"),
        (TOKENIZER, lambda found: found | {"added_tokens": {"a": 1}}, "which is not a list"),
        (TOKENIZER, lambda found: found | {"added_tokens": [{"content": "x"}]}, "is not an object with an id and its"),
        (SETTINGS, lambda found: found["added_tokens_decoder"].update({"48": {"content": "<x>"}}), "token id 48 does"),
        (
            SETTINGS,
            lambda found: found["added_tokens_decoder"].update({"x": {"content": "<x>"}}),
            "is not an id with a",
        ),
        (
            SETTINGS,
            lambda found: found | {"added_tokens_decoder": [1]},
            "added_tokens_decoder is [1], which is not an object",
        ),
        (SETTINGS, lambda found: found | {"eos_token": 3}, "eos_token is 3, which does not name a token"),
        (SETTINGS, lambda found: found | {"chat_template": 3}, "chat_template is 3, which is neither a template"),
        ("special_tokens_map.json", lambda found: found | {"pad_token": [3]}, "pad_token is [3], which does not name"),
    ],
)
def test_a_tokenizer_s_file_that_is_wrong_is_named(model, name, edit, what):
    change(model, name, edit)
    assert what in refused(model) and name in refused(model)


def test_a_token_that_only_the_tokenizer_s_settings_name_needs_a_row_too(model):
    """transformers would give it the id 42, and the model of this vocabulary ends at 41."""
    change(model, SETTINGS, lambda found: found | {"pad_token": "<|new|>"})
    released_model.check_released(model)  # there are 48 rows, and 42 tokens
    vocabulary = {f"t{number}": number for number in range(42, 48)}
    change(model, TOKENIZER, lambda found: found["model"]["vocab"].update(vocabulary))
    assert 'the special token "<|new|>" is not in tokenizer.json, and the model has no row' in refused(model)


def test_every_type_of_safetensors_is_known():
    """Those of the installed library, which refuses all others."""
    safetensors = pytest.importorskip("safetensors")
    with pytest.raises(safetensors.SafetensorError) as error:
        safetensors.deserialize(small_file({"x": {"dtype": "nothing", "shape": [1], "data_offsets": [0, 1]}}))
    names = {word.strip("`,. ") for word in str(error.value).split() if word.startswith("`")} - {"nothing"}
    assert names and names == set(safetensors_header.BITS)


def small_file(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0"
