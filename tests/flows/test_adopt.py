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
    assert len(CASES) >= 85


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
}


@pytest.mark.parametrize(("stack", "path", "gpus"), VALUES)
def test_values_of_a_file(stack, path, gpus, tmp_path):
    file = tmp_path / "draft.yaml"
    file.write_text(imported(stack, path, gpus)[0].text)
    run = load(file, illegal=True)
    shown = {key: getattr(getattr(run, key.split(".")[0]), key.split(".")[1]) for key in VALUES[stack, path, gpus]}
    assert shown == VALUES[stack, path, gpus]


GUIDES = {
    "# Megatron: LoRA Fine-tuning GLM-4.7 (358B MoE)\n\n| Tensor (TP) | 2 | x |\n| Expert (EP) | 4 | x |\n": (
        "glm47-as-documented",
        {"layout": {"ep": 4}},
    ),
    "# Megatron SFT Training for MoE Models\n\n### 1. DeepSeek-V3\n\n- Expert Parallelism: 32\n\n### 2. Qwen3\n": (
        "deepseek-v3-64-as-documented",
        {},
    ),
}


@pytest.mark.parametrize("text", GUIDES)
def test_a_guide_extends_the_configuration_that_has_it(text, tmp_path, capsys):
    (tmp_path / "guide.md").write_text(text)
    assert command.main([str(tmp_path / "guide.md"), "--no-plan"]) == 0
    shown = capsys.readouterr()
    preset, differs = GUIDES[text]
    assert yaml.safe_load(shown.out) == {"name": "guide", "extends": preset} | differs
    assert "ep is not a factor of dp" in shown.err


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
