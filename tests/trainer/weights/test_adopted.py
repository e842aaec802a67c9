"""trainer/weights/adopted: merged adapters against PEFT's own model, and checkpoints of other stacks."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from conf import peft_adapter
from conf.model_files import config_json
from contract.faults import Fault
from trainer.weights.adopted import checkpoints, files, merged

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("torch.distributed is disabled", "Setting `save_embedding")
]

SIZES = {"vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 8}
SIZES |= {"num_key_value_heads": 1, "tie_word_embeddings": False, "max_position_embeddings": 64}
# Twice 12 is 24: the shapes of gate_up do not tell inputs from outputs.
EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
CONFIGS = {
    "dense": LlamaConfig(intermediate_size=40, **SIZES),
    "moe": Qwen3MoeConfig(intermediate_size=40, mlp_only_layers=[], decoder_sparse_step=1, **EXPERTS, **SIZES),
}
TOKENS = torch.arange(40).reshape(2, 20) * 7 % 64
IN_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = {
    "all-linear": ("dense", {"target_modules": "all-linear"}),
    "regular expression, patterns, rsLoRA": (
        "dense",
        {
            "target_modules": r".*layers\.1\..*(q|k|up)_proj",
            "rank_pattern": {"k_proj": 2, "up_proj": 6},
            "alpha_pattern": {r"layers\.1\.mlp\.up_proj": 5},
            "use_rslora": True,
        },
    ),
    "some layers": ("dense", {"target_modules": ["o_proj", "lm_head"], "layers_to_transform": [1]}),
    "DoRA": ("dense", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "saved modules": ("dense", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "tokens": ("dense", {"target_modules": ["v_proj"], "trainable_token_indices": [3, 7, 10]}),
    "embedding": ("dense", {"target_modules": ["embed_tokens", "gate_proj"]}),
    "experts": ("moe", {"target_modules": ["q_proj", "k_proj"], "target_parameters": IN_PARAMETERS}),
    "router": ("moe", {"target_modules": ["v_proj"], "modules_to_save": ["mlp.gate"]}),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    for name, config in CONFIGS.items():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    return folder


def written(base: Path, folder: Path, **config) -> torch.Tensor:
    """Let PEFT write an adapter with random values. Return its own model's logits."""
    lora = LoraConfig(**{"r": 4, "lora_alpha": 7, "task_type": "CAUSAL_LM"} | config)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return logits(model)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def adopted(source: Path, out: Path, adapter: Path | None = None) -> torch.Tensor:
    tensors = checkpoints.read(source)[1]
    files.write(source, merged.tensors(source, adapter, tensors) if adapter else tensors, out)
    return logits(AutoModelForCausalLM.from_pretrained(out))


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_adapter_is_the_model_of_peft(bases, tmp_path, kind):
    base, config = KINDS[kind]
    expected = written(bases / base, tmp_path / "adapter", **config)
    assert (adopted(bases / base, tmp_path / "out", tmp_path / "adapter") - expected).abs().max() < 1e-5
    before = logits(AutoModelForCausalLM.from_pretrained(bases / base))
    assert (before - expected).abs().max() > 0.01


def rewritten(folder: Path, to: Path, change, **config) -> Path:
    """Write the adapter with other tensors, and with other values in its adapter_config.json."""
    to.mkdir()
    save_file(change(load_file(folder / peft_adapter.WEIGHTS)), to / peft_adapter.WEIGHTS)
    settings = json.loads((folder / peft_adapter.CONFIG).read_text())
    (to / peft_adapter.CONFIG).write_text(json.dumps(settings | config))
    return to


def exchanged(tensors: dict) -> dict:
    """The experts of PEFT before 0.19."""
    found = dict(tensors)
    for key in (key for key in tensors if ".experts." in key and "lora_A" in key):
        other = key.replace("lora_A", "lora_B")
        a, b = tensors[key], tensors[other]
        found[key] = b.view(len(b), 4, 4).permute(2, 1, 0).reshape(16, len(b)).contiguous()
        found[other] = a.view(4, 4, -1).permute(2, 1, 0).reshape(-1, 16).contiguous()
    return found


def separate(tensors: dict) -> dict:
    """The experts of transformers 4: a module for each."""
    found = {key: tensor for key, tensor in tensors.items() if ".experts." not in key}
    for key in (key for key in tensors if ".experts." in key and "lora_A" in key):
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")].view(-1, 4, 4)
        path = key.partition(".experts.")[0]
        leaves = ("gate", "up") if len(b) == 24 and ".base_layer." in key else ("down",)
        for number in range(4):
            for leaf, rows in zip(leaves, b[:, :, number].chunk(len(leaves)), strict=True):
                name = f"{path}.experts.{number}.{leaf}_proj.lora"
                found |= {f"{name}_A.weight": a[4 * number : 4 * number + 4].clone(), f"{name}_B.weight": rows.clone()}
    return found


def grouped(tensors: dict) -> dict:
    """The experts of Unsloth before 2026.9.6."""
    of_experts = [key for key in tensors if ".experts." in key and "lora_B" in key]
    return tensors | {key: tensors[key].view(-1, 4, 4).transpose(1, 2).reshape(-1, 16) for key in of_experts}


UNSLOTH = {"base_model_class": "Qwen3MoeForCausalLM", "unsloth_fixed": True}
OF_B = {"lora_B_layout": "grouped_by_expert", "num_experts": 4}
ORDER = {"lora_A_layout": "grouped_by_expert", "parameters": {"gate_up_proj": OF_B, "down_proj": OF_B}}


def nested(tensors: dict) -> dict:
    """Names of a model with vision, wrapped by FSDP, with the adapter's name."""
    return {
        key.replace("model.layers", "model.language_model.layers")
        .replace(".self_attn", "._fsdp_wrapped_module.self_attn")
        .replace("lora_A.", "lora_A.default."): tensor
        for key, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (exchanged, {"peft_version": "0.18.1"}),
        (exchanged, {"peft_version": None}),
        (separate, {"target_parameters": None}),
        (grouped, {"auto_mapping": UNSLOTH}),
        (grouped, {"unsloth_fused_expert_lora": ORDER, "lora_B_layout": "grouped_by_expert"}),
        (dict, {"auto_mapping": UNSLOTH | {"lora_B_layout": "rank_major"}}),
        (nested, {}),
        (lambda t: {key.removeprefix("base_model.model."): tensor for key, tensor in t.items()}, {}),
    ],
)
def test_other_names_and_older_versions_are_the_same_adapter(bases, tmp_path, change, config):
    expected = written(bases / "moe", tmp_path / "adapter", **KINDS["experts"][1])
    other = rewritten(tmp_path / "adapter", tmp_path / "other", change, **config)
    assert (adopted(bases / "moe", tmp_path / "out", other) - expected).abs().max() < 1e-5


def another(tensors: dict, key: str, change) -> dict:
    (found,) = (name for name in tensors if name.endswith(key))
    return change(tensors, found)


@pytest.mark.parametrize(
    ("key", "change", "config", "says"),
    [
        (
            "1.self_attn.q_proj.lora_B.weight",
            lambda t, k: {n: t[n] for n in t if n != k},
            {},
            "lora_A.weight: its other",
        ),
        ("1.self_attn.q_proj.lora_B.weight", lambda t, k: t | {k: t[k][1:]}, {}, r"q_proj\.lora_A.* do not fit model"),
        ("1.self_attn.q_proj.lora_A.weight", lambda t, k: t | {k + "2": t[k].clone()}, {}, "lora_A.weight2 repeats"),
        ("1.self_attn.q_proj.lora_A.weight", lambda t, k: t, {"r": 8}, "has rank 4, but .* has rank 8"),
        ("1.self_attn.q_proj.lora_A.weight", lambda t, k: t, {"peft_type": "IA3"}, "is IA3, but only LoRA"),
        ("1.self_attn.q_proj.lora_A.weight", lambda t, k: t, {"use_qalora": True}, "use_qalora is set"),
        ("1.self_attn.q_proj.lora_A.weight", lambda t, k: t, {"init_lora_weights": "pissa"}, "pissa has changed"),
        ("1.self_attn.q_proj.lora_A.weight", lambda t, k: t, {"rank_pattern": {"(": 1}}, r"rank_pattern: \("),
        (
            "1.self_attn.q_proj.lora_A.weight",
            lambda t, k: t | {k.replace("q_", "z_"): t[k].clone()},
            {},
            "z_.* missing",
        ),
        (
            "1.self_attn.q_proj.lora_B.weight",
            lambda t, k: t | {k.replace(".weight", ".bias"): torch.ones(24)},
            {},
            r"a bias of an adapter",
        ),
        (
            "1.self_attn.q_proj.lora_A.weight",
            lambda t, k: t | {"base_model.model.lm_head.weight": torch.zeros(70, 24)},
            {},
            r"lm_head\.weight is \[70, 24\] of another vocabulary",
        ),
        (
            "1.self_attn.q_proj.lora_A.weight",
            lambda t, k: t | {"base_model.model.model.layers.1.self_attn.q_proj.bias": torch.zeros(24)},
            {},
            r"q_proj\.bias has no place",
        ),
    ],
)
def test_an_adapter_that_is_not_exact_is_refused_by_name(bases, tmp_path, key, change, config, says):
    written(bases / "dense", tmp_path / "adapter", target_modules=["q_proj"])
    other = rewritten(tmp_path / "adapter", tmp_path / "other", lambda t: another(t, key, change), **config)
    with pytest.raises(Fault, match=f"^model.merge_adapter: {other}: .*({says})") as refused:
        merged.tensors(bases / "dense", other, checkpoints.read(bases / "dense")[1])
    assert "\n" not in str(refused.value)


def test_an_unknown_order_of_experts_is_refused(bases, tmp_path):
    written(bases / "moe", tmp_path / "adapter", **KINDS["experts"][1])
    mixed = {"parameters": {"down_proj": {"lora_B_layout": "mixed"}}}
    other = rewritten(tmp_path / "adapter", tmp_path / "other", dict, unsloth_fused_expert_lora=mixed)
    with pytest.raises(Fault, match="down_proj has lora_B_layout mixed, which is not supported"):
        peft_adapter.read(other, config_json.read(bases / "moe/config.json"))


def test_a_pickle_is_refused_with_the_command_that_converts_it(bases, tmp_path):
    written(bases / "dense", tmp_path / "adapter", target_modules=["q_proj"])
    weights = tmp_path / "adapter" / peft_adapter.WEIGHTS
    torch.save(load_file(weights), weights.with_name(peft_adapter.PICKLED))
    weights.unlink()
    with pytest.raises(Fault, match=r"adapter_model\.bin is a pickle.*python -c"):
        peft_adapter.read(tmp_path / "adapter", config_json.read(bases / "dense/config.json"))


def test_a_tied_output_layer_is_refused(bases, tmp_path):
    written(bases / "dense", tmp_path / "adapter", target_modules=["lm_head"])
    tied = config_json.read(bases / "dense/config.json") | {"tie_word_embeddings": True}
    with pytest.raises(Fault, match=r"lm_head.* has no place.*tie_word_embeddings"):
        peft_adapter.read(tmp_path / "adapter", tied)


def described(base: Path, folder: Path) -> Path:
    folder.mkdir()
    shutil.copyfile(base / "config.json", folder / "config.json")
    return folder


def of_fsdp(state: dict, folder: Path) -> None:
    save({"model": state}, checkpoint_id=folder / "checkpoint-20/pytorch_model_fsdp_0", no_dist=True)
    save({"optim": {"x": torch.ones(2)}}, checkpoint_id=folder / "checkpoint-20/optimizer_0", no_dist=True)
    save({"model": {"old": torch.ones(2)}}, checkpoint_id=folder / "checkpoint-3/pytorch_model_fsdp_0")


def of_deepspeed(state: dict, folder: Path) -> None:
    names = [*state]
    for number, part in enumerate((names[:5], names[5:]), 1):
        torch.save({name: state[name] for name in part}, folder / f"pytorch_model-0000{number}-of-00002.bin")


@pytest.mark.parametrize("write", [of_fsdp, of_deepspeed])
def test_a_sharded_checkpoint_is_its_model(bases, tmp_path, write):
    """In memory, transformers 5 has the experts of a layer in two tensors."""
    model, source = AutoModelForCausalLM.from_pretrained(bases / "moe"), described(bases / "moe", tmp_path / "source")
    write(model.state_dict(), source)
    assert (adopted(source, tmp_path / "out") - logits(model)).abs().max() < 1e-6


@pytest.mark.parametrize("write", [of_fsdp, of_deepspeed])
def test_missing_extra_and_misshapen_tensors_are_refused_by_name(bases, tmp_path, write):
    state, source = dict(load_file(bases / "dense/model.safetensors")), described(bases / "dense", tmp_path / "source")
    del state["model.layers.1.self_attn.q_proj.weight"]
    state |= {"model.extra.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(23)}
    write(state, source)
    with pytest.raises(Fault) as refused:
        checkpoints.read(source)
    text = str(refused.value)
    assert "tensors missing (1): model.layers.1.self_attn.q_proj.weight" in text
    assert re.search(r"nothing in the model uses \(1\): (model\.)?model\.extra\.weight", text)
    assert "model.norm.weight is [23]" in text


class Harmful:
    def __reduce__(self):
        return print, ("this code has run",)


def test_code_in_a_checkpoint_does_not_run(bases, tmp_path, capsys):
    source = described(bases / "dense", tmp_path / "source")
    torch.save({"model.norm.weight": Harmful()}, source / "pytorch_model.bin")
    with pytest.raises(Fault, match="not readable as tensors alone"):
        checkpoints.read(source)
    (source / "pytorch_model.bin").unlink()
    (source / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(Fault, match="damaged"):
        checkpoints.read(source)
    assert "this code has run" not in capsys.readouterr().out


def test_no_tensor_of_a_release_is_dropped_without_a_word(bases, tmp_path):
    base = shutil.copytree(bases / "dense", tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | {"vision.mask": torch.tensor([5, 3, 8])}, base / "model.safetensors")
    assert checkpoints.read(base)[1]["vision.mask"].make().tolist() == [5, 3, 8]
    save_file(tensors | {"vision.mask": torch.tensor([True, False])}, base / "model.safetensors")
    with pytest.raises(Fault, match=r"base: tensors of a type that is not read \(1\): vision\.mask \(BOOL\)$"):
        checkpoints.read(base)


def test_a_layout_that_is_not_read_is_one_line_with_the_remedy(bases, tmp_path):
    source = described(bases / "dense", tmp_path / "source")
    (source / "global_step5").mkdir()
    (source / "global_step5/mp_rank_00_model_states.pt").touch()
    with pytest.raises(Fault, match=r"its weights have DeepSpeed's own layout; run its zero_to_fp32"):
        checkpoints.read(source)
