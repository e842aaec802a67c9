"""transformers takes the tiny checkpoints for real ones. Their way through Megatron is tested elsewhere."""

import filecmp
import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

from conf import families
from conf.model_files import config_json
from trainer import tiny
from trainer.patches.families import kimi_k2
from trainer.rehearsal.tiny_models import KINDS, SPECIAL_TOKENS, make_data, make_model

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 17 + 25?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "And 1 + 1?"},
    {"role": "assistant", "content": "2"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp("tiny") / kind for kind in KINDS}
    for kind, folder in folders.items():
        make_model(kind, folder, dtype="float32")
    return folders


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(index["weight_map"].values())):
        with safe_open(folder / shard, "pt") as file:
            names: list[str] = file.keys()
            assert all(index["weight_map"][name] == shard for name in names)
            tensors |= {name: file.get_tensor(name) for name in names}
    assert tensors.keys() == index["weight_map"].keys()
    assert sum(tensor.nbytes for tensor in tensors.values()) == index["metadata"]["total_size"]
    return tensors


def assert_same_files(left: Path, right: Path) -> None:
    names = sorted(path.name for path in left.iterdir())
    assert names == sorted(path.name for path in right.iterdir())
    assert filecmp.cmpfiles(left, right, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_every_tensor(folders, kind):
    from transformers import AutoModelForCausalLM

    kimi_k2.install()
    loaded: Any = AutoModelForCausalLM.from_pretrained(folders[kind], output_loading_info=True)
    model, info = loaded
    architecture = KINDS[kind]["architectures"][0]
    assert type(model).__name__ in (architecture, architecture.replace("ForConditionalGeneration", "ForCausalLM"))
    copied = families.of(KINDS[kind]).copied  # a tiny model has no vision tower
    assert not [name for name in info["missing_keys"] if not name.startswith(copied)] and not info["mismatched_keys"]
    assert all(name.startswith("model.layers.4.") for name in info["unexpected_keys"])
    # the layer that transformers does not build; it ignores those in mtp.* silently
    numbered = KINDS[kind].get("num_nextn_predict_layers") and not families.of(KINDS[kind]).ahead
    assert bool(info["unexpected_keys"]) == bool(numbered)

    tokens = torch.tensor([[70, 80, 90, 70, 80, 90]])
    with torch.no_grad():
        logits = model(tokens).logits[0]
    assert logits.isfinite().all() and logits.std() > 0.5
    assert (logits[0] - logits[3]).abs().max() > 0.1  # the same token elsewhere

    for name, buffer in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            assert buffer.count_nonzero() == buffer.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer(folders, kind):
    from transformers import AutoTokenizer

    kimi_k2.install()
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    assert len(tokenizer) == config_json.of_text(KINDS[kind])["vocab_size"]
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == [0, 1, 2, 3, 4]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    for text in (
        "What is 17 + 25?",
        " tabs\t, lines\r\n\n and  blanks ",
        "naïve e\u0301 中文 🦊 \u200b\x00 Ω",
        "it 's , so .",
    ):
        kept = unicodedata.normalize("NFC", text) if kind == "qwen2" else text  # as Qwen2's own tokenizer writes it
        assert tokenizer.decode(tokenizer.encode(text)) == kept
    assert tokenizer.encode("<|user|>hi<|endoftext|>")[0] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_chat_template_marks_what_the_assistant_says(folders, kind):
    from transformers import AutoTokenizer

    kimi_k2.install()
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    chat = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, mask in zip(chat["input_ids"], chat["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(said) == "42<|endoftext|>2<|endoftext|>"
    prompt = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|system|>\nBe brief.\n<|user|>\nWhat is 17 + 25?\n<|assistant|>\n"


def test_multi_token_prediction_layer(folders):
    main, mtp = read_tensors(folders["glm4-moe"]), read_tensors(folders["glm4-moe-mtp"])
    extra = {name.removeprefix("model.layers.4."): mtp.pop(name) for name in mtp.keys() - main.keys()}
    assert all(torch.equal(tensor, main[name]) for name, tensor in mtp.items())
    assert torch.equal(extra.pop("embed_tokens.weight"), main["model.embed_tokens.weight"])
    assert torch.equal(extra.pop("shared_head.head.weight"), main["lm_head.weight"])
    shapes = {name: tuple(tensor.shape) for name, tensor in extra.items()}
    decoder = {name.removeprefix("model.layers.3."): tuple(main[name].shape) for name in main if ".layers.3." in name}
    assert shapes == decoder | {
        "eh_proj.weight": (128, 256),
        "enorm.weight": (128,),
        "hnorm.weight": (128,),
        "shared_head.norm.weight": (128,),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_bytes(folders, kind, tmp_path):
    make_model(kind, tmp_path / "same", dtype="float32")
    assert_same_files(folders[kind], tmp_path / "same")
    make_model(kind, tmp_path / "other", seed=1, dtype="float32")
    ours, other = read_tensors(folders[kind]), read_tensors(tmp_path / "other")
    assert not any(torch.equal(tensor, other[name]) for name, tensor in ours.items())


def test_bfloat16_keeps_the_router_bias_in_float32(folders, tmp_path):
    make_model("glm4-moe", tmp_path / "half")
    full = read_tensors(folders["glm4-moe"])
    for name, tensor in read_tensors(tmp_path / "half").items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert tensor.dtype == dtype and torch.equal(tensor, full[name].to(dtype))


def test_data(tmp_path):
    make_data(tmp_path / "a", rows=100)
    make_data(tmp_path / "b", rows=100)
    assert_same_files(tmp_path / "a", tmp_path / "b")
    rows = {split: (tmp_path / "a" / f"{split}.jsonl").read_text().splitlines() for split in ("training", "validation")}
    assert (len(rows["training"]), len(rows["validation"])) == (100, 12)
    examples = [json.loads(row) for split in rows.values() for row in split]
    assert all(example.keys() == {"input", "output"} for example in examples)
    assert len({example["input"] for example in examples}) == 112
    lengths = [len(example["input"]) for example in examples]
    assert min(lengths) < 20 and max(lengths) > 200


def test_command_line(folders, tmp_path):
    command = [sys.executable, "-m", "trainer.tiny"]
    root = Path(__file__).parents[2]
    out = tmp_path / "new" / "llama"
    subprocess.run([*command, "llama", str(out), "--dtype", "float32"], cwd=root, check=True)
    assert_same_files(folders["llama"], out)  # in another process, so under another hash seed
    again = subprocess.run([*command, "data", str(out)], cwd=root, capture_output=True, text=True)
    assert again.returncode == 2 and again.stderr == f"error: {out} exists and is not an empty folder\n"
    assert [path.name for path in out.parent.iterdir()] == ["llama"]


def test_a_full_disk_is_one_line(tmp_path, monkeypatch, capsys):
    def full(*arguments, **options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    monkeypatch.setattr("sys.argv", ["tiny", "llama", str(tmp_path / "llama")])
    with pytest.raises(SystemExit, match=r"^2$"):
        tiny.main()
    line = rf"error: {tmp_path}: No space left on device; .* are free there\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rows", ["0", "-5"])
def test_no_rows_are_no_data(tmp_path, monkeypatch, capsys, rows):
    monkeypatch.setattr("sys.argv", ["tiny", "data", str(tmp_path / "data"), f"--rows={rows}"])
    with pytest.raises(SystemExit) as end:
        tiny.main()
    assert end.value.code == 2 and f"--rows: {rows} is not a positive number of rows" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("no space")

    monkeypatch.setattr("trainer.rehearsal.tiny_models.write_json", fail)
    with pytest.raises(OSError, match="no space"):
        make_model("llama", tmp_path / "llama")
    assert not list(tmp_path.iterdir())
