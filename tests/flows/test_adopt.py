"""finetune adopt: configurations of other stacks from public repositories, and the five published guides.

tests/assets/adopt/STACK.txt has many files, each after a line `=== path`; README.md there names sources and licences.
"""

import re
import time
from functools import cache
from pathlib import Path

import pytest
import yaml

from benchmarks import migration
from conf.load import load
from flows.adopt import __main__ as command
from flows.adopt import adopted, reading
from flows.adopt.adopted import Adopted
from flows.adopt.registry import STACKS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/assets/adopt"
TOGETHER = sorted(path.stem for path in FOLDER.glob("*.txt"))


@cache
def files(stack: str) -> dict[str, str]:
    parts = re.split(r"^=== (?!from )(.*)\n", (FOLDER / f"{stack}.txt").read_text(), flags=re.MULTILINE)
    bodies = [re.sub(r"^=== from .*\n?", "", body, flags=re.MULTILINE) for body in parts[2::2]]
    return dict(zip(parts[1::2], bodies, strict=True))


@cache
def imported(stack: str, path: str, gpus: int | None = None) -> tuple[Adopted, float]:
    begin = time.process_time()
    found = reading.choose(reading.sources(files(stack)[path], path), None, None)
    assert found, "not recognised"
    result = adopted.convert(found[0][1], found[0][0], "draft", _folder(), gpus)
    return result, time.process_time() - begin


@cache
def _folder() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="adopt-"))


CASES = [(stack, path) for stack in TOGETHER for path in files(stack)]


@pytest.mark.parametrize("stack", TOGETHER)
def test_each_file_is_imported_and_no_key_is_dropped(stack, tmp_path):
    for path in files(stack):
        result, seconds = imported(stack, path)
        assert result.stack.name == stack, path
        assert seconds < 1, path
        lists = [*result.understood, *result.left_out, *result.unread]
        keys = [*result.source.keys, *(f"${name}" for name in result.source.environment)]
        assert sorted(lists) == sorted(keys), path
        assert len(result.understood) >= 4, path
        file = tmp_path / "draft.yaml"
        file.write_text(result.text)
        assert load(file, illegal=True).name == "draft"


def test_a_hundred_files_are_imported():
    assert len(CASES) >= 100


RECIPES = "src/megatron/bridge/recipes"
# Read from the files by hand. The number of GPUs is that of --gpus.
VALUES = {
    ("axolotl", "examples/llama-3/lora-8b.yml", 4): {
        "model.source": "NousResearch/Meta-Llama-3-8B",
        "optimizer.lr": 2e-4,
        "optimizer.warmup": 0.1,
        "train.global_batch": 2 * 4 * 4,  # micro, accumulation, GPUs
        "train.epochs": 4,
        "adapter.rank": 32,
        "adapter.alpha": 16,
        "adapter.init": "kaiming",
        "adapter.targets": "all-linear",
        "data.seq_length": 4096,
        "data.packed": True,
        "layout.auto": True,
    },
    ("ms-swift", "examples/megatron/lora/moe.sh", None): {
        "model.source": "Qwen/Qwen3-30B-A3B",
        "optimizer.lr": 1e-4,
        "optimizer.min_lr": 1e-5,
        "optimizer.warmup": 0.05,
        "train.global_batch": 16,
        "train.micro_batch": 8,
        "train.epochs": 1,
        "train.recompute": "full",
        "adapter.rank": 8,
        "adapter.alpha": 32,
        "layout.ep": 2,
        "layout.etp": 1,
        "layout.gpus_per_node": 2,
        "checkpoint.save_optimizer": False,
    },
    ("verl", "examples/sft/gsm8k/run_qwen_05_peft.sh", 4): {
        "model.source": "Qwen/Qwen2.5-0.5B-Instruct",
        "optimizer.lr": 1e-4,
        "train.global_batch": 256,  # verl's default
        "train.epochs": 1,
        "adapter.rank": 32,
        "adapter.alpha": 16,
        "adapter.targets": "all-linear",
        "data.seq_length": 1024,  # verl's default
    },
    ("verl-rl", "examples/grpo_trainer/run_qwen3moe-30b_megatron_lora.sh", None): {
        "model.source": "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "reinforce.lr": 3e-6,
        "reinforce.prompts": 128,
        "reinforce.samples": 4,
        "reinforce.kl": 0.001,
        "reinforce.start": "base",
        "data.seq_length": 1024 + 1024,  # prompt and answer
        "adapter.rank": 32,
        "adapter.alpha": 64,
        "layout.tp": 2,
        "layout.pp": 2,
        "layout.cp": 2,
        "layout.ep": 4,
        "layout.etp": 1,
    },
    ("llama-factory", "examples/train_lora/qwen3_lora_sft.yaml", 2): {
        "model.source": "Qwen/Qwen3-4B-Instruct-2507",
        "optimizer.lr": 1e-4,
        "optimizer.warmup": 0.1,
        "train.global_batch": 1 * 8 * 2,
        "train.epochs": 3,
        "adapter.rank": 8,
        "adapter.alpha": 16,  # twice the rank, LLaMA-Factory's default
        "adapter.targets": "all-linear",
        "data.seq_length": 2048,
    },
    ("trl", "examples/scripts/sft_gpt_oss.py", 8): {
        "model.source": "openai/gpt-oss-20b",
        "adapter.kind": "none",
        "optimizer.lr": 2e-5,  # TRL's default
        "optimizer.min_lr": 0.0,  # lr_scheduler_kwargs is listed as unread
        "optimizer.warmup": 0.03,
        "train.global_batch": 2 * 8,
        "train.epochs": 1,
        "data.packed": True,
        "data.seq_length": 4096,
    },
    ("oumi", "configs/recipes/llama3_1/sft/8b_lora/fsdp_train.yaml", 4): {
        "model.source": "meta-llama/Llama-3.1-8B-Instruct",
        "optimizer.lr": 3e-4,
        "optimizer.warmup_steps": 100,
        "train.global_batch": 8 * 8 * 4,
        "train.epochs": 1,
        "adapter.rank": 8,
        "adapter.alpha": 16,
        "adapter.targets": ("linear_qkv",),
        "data.source": "yahma/alpaca-cleaned",
    },
    ("torchtune", "recipes/configs/llama3_1/8B_lora.yaml", 2): {
        "adapter.kind": "lora",
        "optimizer.lr": 3e-4,
        "optimizer.warmup_steps": 100,
        "optimizer.clip_grad": 0,
        "train.global_batch": 2 * 8 * 2,
        "train.epochs": 1,
        "adapter.rank": 8,
        "adapter.alpha": 16,
        "adapter.targets": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        "data.source": "yahma/alpaca-cleaned",
    },
    ("unsloth", "tests/saving/language_models/test_push_to_hub_merged.py", None): {
        "model.source": "unsloth/Llama-3.2-1B-Instruct",
        "model.base": "nvfp4",
        "optimizer.lr": 2e-4,
        "optimizer.decay": "linear",
        "train.global_batch": 2 * 4,
        "train.steps": 30,
        "train.seed": 3407,
        "adapter.rank": 16,
        "adapter.alpha": 16,
        "data.split": "train",
    },
    ("megatron-bridge", f"{RECIPES}/glm/h100/glm45.py, glm45_355b_peft_16gpu_h100_bf16_config", None): {
        "model.source": "zai-org/GLM-4.5",
        "optimizer.lr": 1e-4,
        "optimizer.warmup_steps": 50,
        "train.global_batch": 128,
        "train.micro_batch": 1,
        "train.steps": 1000,
        "adapter.kind": "lora",
        "layout.nodes": 2,
        "layout.tp": 2,
        "layout.pp": 4,
        "layout.ep": 4,
        "layout.etp": 2,
    },
    ("nemo", "nemo/collections/llm/recipes/deepseek_v3.py, finetune_recipe", None): {
        "model.source": "deepseek-ai/DeepSeek-V3-Base",
        "adapter.kind": "lora",
        "optimizer.lr": 1e-4,
        "layout.tp": 8,
        "layout.pp": 5,
        "layout.ep": 1,
        "layout.first_stage_layers": 13,
        "layout.last_stage_layers": 12,
    },
    ("megatron-lm", "examples/mixtral/train_mixtral_8x7b_distributed.sh", None): {
        "optimizer.lr": 1e-4,
        "optimizer.min_lr": 1e-5,
        "optimizer.warmup_steps": 500,
        "train.global_batch": 256,
        "train.steps": 500_000,
        "adapter.kind": "none",
        "moe.aux_loss_coeff": 0.01,
        "layout.pp": 4,
        "layout.ep": 8,
    },
}


@pytest.mark.parametrize(("stack", "path", "gpus"), VALUES)
def test_values_of_a_file(stack, path, gpus, tmp_path):
    file = tmp_path / "draft.yaml"
    file.write_text(imported(stack, path, gpus)[0].text)
    run = load(file, illegal=True)
    shown = {key: getattr(getattr(run, key.split(".")[0]), key.split(".")[1]) for key in VALUES[stack, path, gpus]}
    assert shown == VALUES[stack, path, gpus]


MOE = """
# Megatron SFT Training for MoE Models
### 1. DeepSeek-V3 (671B)
```bash
NNODES=8 bash run.sh
```
- Expert Parallelism: 32
- Pipeline Parallelism: 16
- Tensor Parallelism: 1
### 2. Qwen3-236B
- Expert Parallelism: 4
- Pipeline Parallelism: 8
- Tensor Parallelism: 4
### 3. Mixtral 8x7B
- Expert Parallelism: 4
- Pipeline Parallelism: 2
- Tensor Parallelism: 2
## More
"""
OUMI = """
# Megatron-LM Integration for Oumi
### 1. Prepare Your Configuration
```yaml
model: {model_name: meta-llama/Llama-3.1-70B-Instruct}
training: {max_steps: 1000, per_device_train_batch_size: 1, learning_rate: 5.0e-7}
megatron: {tensor_model_parallel_size: 8, pipeline_model_parallel_size: 2, enable_sequence_packing: True}
```
### 2. Launch
**405B Model**:
```yaml
megatron:
  tensor_model_parallel_size: 8
  pipeline_model_parallel_size: 16
  context_parallel_size: 2
  virtual_pipeline_model_parallel_size: 32
  transformer_config: {recompute_granularity: full}
```
## References
"""
GLM47 = """
# Megatron: LoRA Fine-tuning GLM-4.7 (358B MoE)
| Tensor (TP) | 2 | Splits |
| Pipeline (PP) | 1 | No |
| Expert (EP) | 8 | Distributes |
```python
LoRA(
    dim=128,  # rank
    alpha=32,
    dropout=0.05,
)
```
| Global batch size | 16 |
| Sequence length | 8192 |
| Learning rate | 1e-4 (cosine decay) |
| Training iterations | 650 |
"""
SWIFT = """
# Multi-Node GLM-4.7 Training with ms-swift on Modal
```
--tp-size 2   (default)
```
Always enabled (`--sequence_parallel true`).
| Rank | 128 | `--lora-rank` |
| Epochs | 4 | `--max-epochs` |
| LR warmup | 5% of steps | (hardcoded) |
"""
GPT2 = (
    "## Megatron-LM\n1. **Baseline**: micro-batch-size=global-batch-size=32\n1. **Data Parallel**: nproc-per-node=2\n"
)
# Values of the five guides, the configuration that each extends, and the keys that differ from it.
GUIDES = [
    (GLM47, 1, "glm47-as-documented", {}, 10),
    (
        SWIFT,
        1,
        "glm47-b200",
        {"layout": {"tp": 2, "sp": True}, "train": {"epochs": 4}, "optimizer": {"warmup": 0.05}},
        5,
    ),
    (MOE, 1, "deepseek-v3-64-as-documented", {}, 4),
    (MOE, 2, "qwen3-235b-as-documented", {}, 3),
    (MOE, 3, "mixtral-8x7b-as-documented", {}, 3),
    (GPT2, 1, "gpt2-large-as-documented", {}, 2),
    (OUMI, 1, "llama31-70b-as-documented", {}, 7),
    (OUMI, 2, "llama31-405b-as-documented", {}, 5),
]


@pytest.mark.parametrize(("text", "pick", "preset", "differs", "known"), GUIDES, ids=[one[2] for one in GUIDES])
def test_a_guide_extends_the_configuration_that_has_it(text, pick, preset, differs, known, tmp_path, capsys):
    (tmp_path / "guide.md").write_text(text)
    assert command.main([str(tmp_path / "guide.md"), "--no-plan", "--pick", str(pick)]) == 0
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out) == {"name": "guide", "extends": preset} | differs
    assert f"understood ({known}):" in shown.err
    assert "the guide" in shown.err and "differences in meaning" in shown.err


def test_the_report_has_all_lists_and_the_verdict(tmp_path, capsys):
    file = tmp_path / "mine.yml"
    file.write_text(
        "base_model: meta-llama/Llama-3.1-8B-Instruct\nmicro_batch_size: 1\nsequence_len: 512\nmystery: 7\n"
        "learning_rate: 1e-4\noutput_dir: out\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlr_scheduler: rex\n"
    )
    out = tmp_path / "ours.yaml"
    assert command.main([str(file), "--gpus", "2", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "  mystery = 7: no counterpart is known\n" in shown
    assert "  lr_scheduler = rex: optimizer.decay is constant, cosine, linear\n" in shown
    assert "  learning_rate = 1e-4 -> optimizer.lr\n" in shown
    assert "  output_dir = out: paths are set by the flow\n" in shown
    assert "alpha / rank = 2" in shown
    assert "data.source: the file does not name the data" in shown
    assert "legal and fits" in shown
    assert load(out).optimizer.lr == 1e-4


REFUSED = {
    b"\x7fELF\0\0": "a binary file",
    b"\xff\xfe\xfa": "not UTF-8",
    b"hello: world\n": "no training configuration that is known",
    b"base_model: !!python/object/apply:os.system [touch x]\nlora_r: 8\n": "objects in YAML are not created",
    b"base_model: x\nc:\n" + b"".join(b"  k%d: {v: 1}\n" % n for n in range(6000)): "more than 5000 values",
    b"x" * (2**18 + 1): "larger than",
}


@pytest.mark.parametrize("content", REFUSED, ids=list(REFUSED.values()))
def test_what_cannot_be_read_is_refused_in_one_line(content, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_bytes(content)
    assert command.main([str(file), "--no-plan"]) == 2
    shown = capsys.readouterr()
    assert REFUSED[content] in shown.err
    assert shown.out == ""
    assert shown.err.count("\n") == 1


def test_values_of_the_wrong_kind_are_listed(tmp_path):
    (tmp_path / "a.yml").write_text(
        "base_model: [1]\nmicro_batch_size: 1e999\nlora_dropout: {a: b}\nsequence_len: x\nadapter: lora\n"
        "lora_r: [8]\nlora_alpha: -1\nlearning_rate: fast\nsample_packing: [true]\n"
    )
    result, _ = command.adopt(tmp_path / "a.yml")
    assert {"base_model", "micro_batch_size", "sequence_len", "lora_r", "lora_alpha", "learning_rate"} <= {
        *result.unread
    }
    assert result.unread["lora_alpha"].startswith("adapter.alpha: ")


def test_an_existing_file_is_kept(tmp_path, capsys):
    file, out = tmp_path / "a.yml", tmp_path / "out.yaml"
    file.write_text(files("axolotl")["examples/llama-3/lora-8b.yml"])
    out.write_text("mine")
    assert command.main([str(file), "--no-plan", "--out", str(out)]) == 2
    assert out.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert command.main([str(file), "--no-plan", "--out", str(out), "--force"]) == 0
    assert load(out).adapter.rank == 32


def test_nothing_of_a_script_is_run(tmp_path):
    trap = tmp_path / "trap"
    text = f'X=$(touch {trap})\nswift sft --model "$(touch {trap})" --lr `touch {trap}` --max_length 9\n'
    (tmp_path / "a.sh").write_text(text)
    result, _ = command.adopt(tmp_path / "a.sh")
    assert not trap.exists()
    assert result.unread["model"].endswith("set the key here")


def test_variables_arrays_and_continued_lines_of_a_script(tmp_path):
    (tmp_path / "a.sh").write_text(
        "export LR=${1:-3e-5}\nN=4\nARGS=(\n  --lora_rank 16  # inner width\n  --lora_alpha 64\n)\n"
        'swift sft "${ARGS[@]}" \\\n  # a comment\n  --model Qwen/Qwen3-8B --learning_rate $LR \\\n'
        "  --gradient_accumulation_steps $((N * 2)) --max_length 1024 --dataset a/b --seed $UNKNOWN 2>&1 | tee log\n"
    )
    result, _ = command.adopt(tmp_path / "a.sh")
    assert result.source.keys["gradient_accumulation_steps"] == "8"
    ours = yaml.safe_load(result.text)
    assert ours["optimizer"]["lr"] == "3e-05" or float(ours["optimizer"]["lr"]) == 3e-5
    assert (ours["adapter"]["rank"], ours["adapter"]["alpha"]) == (16, 64)
    assert "seed" in result.unread


@pytest.mark.parametrize("name", migration.pages())
def test_the_page_of_a_stack_names_all_its_keys(name):
    text = (ROOT / "docs/migrate" / name).read_text()
    assert text == migration.pages()[name], "run: make schema"
    if name.removesuffix(".md") in STACKS:
        stack = STACKS[name.removesuffix(".md")]
        assert [key for key in [*stack.keys, *stack.left_out] if f"`{key}`" not in text] == []


@pytest.mark.parametrize("example", sorted(migration.EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_the_example_of_a_page_lacks_only_what_its_commands_set(example):
    result, _ = command.adopt(example, gpus=1)
    assert result.stack.name == example.stem
    settings = [setting.partition("=")[0] for setting in migration.SETTINGS.get(example.stem, "").split()]
    assert [key for key in result.missing if key != "checkpoint.save_every"] == settings
    ours = yaml.safe_load(result.text)
    assert ours["data"]["source"] == "tiny://tickets" and ours["data"]["seq_length"] == 64
    assert settings or ours["model"]["source"].startswith("tiny://qwen3")
    lost = {"torchtune": 2, "verl-rl": 1, "megatron-lm": 5}  # each with its reason in the report
    assert len(result.unread) == lost.get(example.stem, 0), result.unread


@pytest.mark.parametrize(("first", "line"), [("swift sft --a '", "x --b 1"), ("A=(", "x y"), ("swift sft", "--a b \\")])
def test_a_large_script_with_an_open_quote_or_array_is_read_in_seconds(first, line):
    begin = time.process_time()
    reading.sources("\n".join([first, *[line] * 25_000]), "here")
    assert time.process_time() - begin < 5


DORA = {
    "axolotl": "base_model: a\nmicro_batch_size: 1\nsequence_len: 8\n{0}: true\nadapter: lora\n",
    "llama-factory": "model_name_or_path: a\nstage: sft\ncutoff_len: 8\n{0}: true\nfinetuning_type: lora\n",
    "ms-swift": "swift sft --model a --{0} true --train_type lora --lora_rank 8 --max_length 8 --dataset d",
    "trl": "trl sft --model_name_or_path a --dataset_name d --{0} true --use_peft --max_length 8",
}


@pytest.mark.parametrize("stack", DORA)
def test_dora_counts_wherever_it_stands(stack):
    text = DORA[stack].format("peft_use_dora" if stack == "axolotl" else "use_dora")
    (source,) = reading.sources(text, "here")
    result = adopted.convert(source, STACKS[stack], "draft", _folder())
    assert yaml.safe_load(result.text)["adapter"]["kind"] == "dora"


ARGUMENTS = """
import argparse
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
parser = argparse.ArgumentParser()
parser.add_argument("-m", "--model-id", default="a")
parser.add_argument("--lr", type=float, default=3e-4)
options = parser.parse_args()
rows = load_dataset("c")
def main():
    model = AutoModelForCausalLM.from_pretrained(options.model_id, load_in_4bit=True)
    config = SFTConfig(learning_rate=options.lr, max_length=8, num_train_epochs=1)
    SFTTrainer(model, args=config, peft_config=LoraConfig(r=8))
"""


def test_arguments_of_a_script_have_their_defaults():
    source = reading.sources(ARGUMENTS, "here")[-1]
    result = adopted.convert(source, STACKS["trl"], "draft", _folder())
    assert source.place == "all functions"
    values = yaml.safe_load(result.text)
    assert values["model"] == {"source": "a", "base": "nvfp4"} and values["optimizer"]["lr"] == 3e-4
    assert "TRL: arguments of the script have their default values here" in result.differences


def test_a_command_that_reads_a_file_names_it(tmp_path, capsys):
    (tmp_path / "run.sh").write_text("srun bash -c 'accelerate launch -m axolotl.cli.train conf/my.yml'\n")
    assert command.main([str(tmp_path / "run.sh")]) == 2
    assert "it names conf/my.yml: adopt that file" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["2>&1 | tee log", "> log 2>&1 &", ">>log", "2> errors", "1>log"])
@pytest.mark.parametrize("command", ["{0} {1}", 'CMD="{0}"\neval $CMD {1}'])
def test_where_the_output_goes_is_no_value(command, end):
    text = command.format("swift sft --model a --dataset d --max_length 8 --learning_rate 3e-4", end)
    result = adopted.convert(*reading.sources(text, "here"), STACKS["ms-swift"], "draft", _folder())
    assert "learning_rate" in result.understood and not result.unread


def test_a_word_in_angle_brackets_is_not_an_input():
    text = "swift sft <MODEL> --learning_rate 3e-4 --model a --dataset d --max_length 8"
    (source,) = reading.sources(text, "here")
    assert source.keys["learning_rate"] == "3e-4"


FILES = {
    "axolotl": "base_model: a\nmicro_batch_size: 1\nsequence_len: 8\ndatasets: [{path: json, data_files: [b.jsonl]}]\n",
    "torchtune": "epochs: 1\ndataset: {_component_: torchtune.datasets.a, source: json, data_files: b.jsonl}\n",
    "trl": """
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
data = load_dataset("json", data_files={"test": "c.jsonl", "train": "b.jsonl"})
SFTTrainer(model="a", args=SFTConfig(learning_rate=1e-4, max_length=8), train_dataset=data["train"])
""",
}


@pytest.mark.parametrize("stack", FILES)
def test_files_of_load_dataset_are_the_data(stack):
    (source,) = reading.sources(FILES[stack], "here")
    result = adopted.convert(source, STACKS[stack], "draft", _folder())
    assert yaml.safe_load(result.text)["data"]["source"] == "b.jsonl"


@pytest.mark.parametrize(
    ("command", "kind", "lr", "batch"),
    [
        ("megatron sft --micro_batch_size 1", "none", 1e-5, 16),
        ("megatron sft --train_type lora", "lora", 1e-4, 16),
        ("swift sft", "lora", 1e-4, 1),
        ("swift sft --tuner_type full", "none", 1e-5, 1),
        ("python /megatron/swift/cli/sft.py", "lora", 1e-4, 1),
        ("python swift/cli/_megatron/sft.py", "none", 1e-5, 16),
    ],
)
def test_defaults_of_ms_swift_follow_its_command(command, kind, lr, batch):
    (source,) = reading.sources(f"{command} --model a --dataset d --max_length 8", "here")
    values = yaml.safe_load(adopted.convert(source, STACKS["ms-swift"], "draft", _folder()).text)
    found = (values["adapter"]["kind"], float(values["optimizer"]["lr"]), values["train"]["global_batch"])
    assert found == (kind, lr, batch)


def test_values_of_commands_are_nulls_and_numbers_of_bits():
    text = "python -m verl.trainer.sft data.train_files=a model.path=b megatron.expert_tensor_parallel_size=null"
    (source,) = reading.sources(text, "here")
    left = adopted.convert(source, STACKS["verl"], "draft", _folder()).left_out
    assert left["megatron.expert_tensor_parallel_size"] == adopted.NO_VALUE
    for bits, base in (4, "nvfp4"), (8, "fp8"), (3, None):
        text = f"swift sft --model a --dataset d --max_length 8 --train_type lora --quant_bits {bits}"
        result = adopted.convert(*reading.sources(text, "here"), STACKS["ms-swift"], "draft", _folder())
        assert yaml.safe_load(result.text)["model"].get("base") == base and ("quant_bits" in result.unread) == (
            not base
        )
