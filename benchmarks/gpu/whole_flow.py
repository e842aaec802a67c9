"""Run the whole flow of a 10 GB model on this host's GPU, and check that each stage ends and has the GPU alone.

    benchmarks/gpu/run whole_flow.py OUT                                     about 5 minutes on one H200, 35 GB of disk
    benchmarks/gpu/run whole_flow.py OUT --auto                              its layout left to the plan
    benchmarks/gpu/run whole_flow.py OUT --preset NAME --layers 8            a configuration of conf/, unchanged:
                                                                             16 minutes for Qwen3.5-35B, 70 GB
    python benchmarks/gpu/whole_flow.py OUT --size tiny --work FOLDER        rehearses it on a CPU in 3 minutes

The model is a Qwen3-MoE of 4.8 billion random weights in bf16 with a small tokenizer, the data are 1600 tickets packed
to 1024 tokens; LoRA, 10 steps. With --preset a stand-in of the Hub on this host has a model and a data set by the names
that the configuration gives: the model with so many of its layers, at their widths, of random weights with a small
tokenizer; the data questions in words with their answers in figures.

nvidia-smi is asked for the GPU's memory each second, and the processes for the stage that runs: OUT/memory.csv.
OUT/whole_flow.txt has a row for each stage, with the most memory in it and before it, a time line, and the result of
the run. OUT/flow.log has the output of the flow, and OUT/logs.txt the end of each stage's logs. Exit code 1 if a stage
has not ended well, two were on the GPU at once, training began before the base's evaluation was over, or the promotion
gives no reason.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
ON_GPU = ("evaluate-base", "train", "evaluate-tuned")  # convert computes on CPUs
STAGES = ("download", "prepare", "convert", "evaluate-base", "train", "export", "evaluate-tuned", "promote")
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}  # of MTP
BLOCK = 32 << 20  # numbers that all tensors are windows of
TOKENIZER = 512  # most tokens; models have more, as many releases do
WIDE = dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768)
WIDE |= dict(num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=64, num_experts_per_tok=8)
SIZES = {  # parameters: 15 or 5 layers of 321 million; 3 layers of 230 thousand
    "10gb": WIDE | dict(num_hidden_layers=15),
    "3gb": WIDE | dict(num_hidden_layers=5),
    "tiny": dict(num_hidden_layers=3, hidden_size=128, intermediate_size=256, moe_intermediate_size=64)
    | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2),
}
CONF = """\
name: whole
model: {{source: {model}}}
data: {{source: {data}, seq_length: 1024, packed: true, template: "{{input}} {{output}}", validation: 0.15, test: 0.04}}
adapter: {{rank: 16, alpha: 32}}
hardware: {{gpu: {gpu}{gate}}}
train: {{steps: {steps}, global_batch: 8,{micro_batch} precision: {precision}, validate_every: {steps},
  validate_batches: 1}}
optimizer: {{lr: 1e-3, warmup_steps: 2}}
checkpoint: {{save_every: {steps}}}
evaluate: {{rows: 20, max_tokens: 8}}
"""
WRITTEN = dict(gate=", gate: warn", micro_batch=" micro_batch: 1,")


def of_size(size: str) -> dict:
    """A config.json of a Qwen3-MoE."""
    from conf import families

    return families.tiny()["qwen3-moe"] | SIZES[size] | dict(max_position_embeddings=4096)


def make_model(folder: Path, config: dict, spread: float = 0.02, shards: int = 8) -> int:
    """Write a model. Returns its bytes.

    Each tensor is a window of one block of random numbers, at a place that follows from its name.
    """
    import numpy as np

    from conf.model_facts import shapes
    from trainer.rehearsal import tiny_models

    tokens = dict(bos_token_id=None, eos_token_id=0, pad_token_id=1)
    text = config.get("text_config", config)
    text |= tokens | dict(dtype="bfloat16")
    released = shapes(config)
    largest = max(int(np.prod(shape)) for shape in released.values())
    drawn = np.random.default_rng(13).standard_normal(BLOCK, dtype=np.float32)
    blocks = {}
    for name, centre, wide in ("weight", 0.0, spread), ("norm", 1.0, 0.1):
        numbers = ((centre + wide * drawn).view(np.uint32) >> 16).astype(np.uint16)  # bf16
        blocks[name] = np.resize(numbers, BLOCK + largest)
    names = list(released)
    parts = [names[n * len(names) // shards : (n + 1) * len(names) // shards] for n in range(shards)]
    files = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]

    def window(name: str):
        if ".layers." in name:  # an MTP layer's copies of the embedding and of the output layer are equal to them
            name = COPIES.get(name.split(".", 3)[-1], name)
        start = zlib.crc32(name.encode()) % BLOCK
        block = blocks["norm" if name.endswith("norm.weight") else "weight"]
        return block[start : start + int(np.prod(released[name]))]

    def write(part: list[str], file: str) -> int:
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name in part:
            end = at + 2 * int(np.prod(released[name]))
            header[name] = {"dtype": "BF16", "shape": list(released[name]), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for name in part:
                f.write(memoryview(window(name)))
        return at

    folder.mkdir(parents=True)
    with ThreadPoolExecutor(shards) as threads:
        total = sum(threads.map(write, parts, files))
    tiny_models.make_tokenizer(folder, min(text["vocab_size"], TOKENIZER))
    weight_map = {name: file for part, file in zip(parts, files, strict=True) for name in part}
    tiny_models.write_json(folder / "config.json", config)
    tiny_models.write_json(folder / "generation_config.json", tokens)
    index = dict(metadata=dict(total_size=total), weight_map=weight_map)
    tiny_models.write_json(folder / "model.safetensors.index.json", index)
    return total


@contextlib.contextmanager
def preset(options: argparse.Namespace, work: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Serve model and data of a preset by their names. Yields the command's word for it, and the environment."""
    from conf.load import load
    from conf.planner.verdict import config_of
    from tests.support import stand_in_hub
    from trainer.trial import cut

    run = load(options.preset)
    make_model(work / "model", as_released(cut(config_of(run)[0], options.layers)))
    make_questions(work / "rows", run.data.config, options.rows)
    with stand_in_hub.serve(work / "hub") as hub:
        hub.publish(f"models/{run.model.source}", work / "model")
        hub.publish(f"datasets/{run.data.source}", work / "rows")
        shutil.rmtree(work / "model")
        yield options.preset, {"HF_ENDPOINT": hub.url, "HF_HOME": str(work / "home"), "HF_HUB_OFFLINE": "0"}


def as_released(config: dict) -> dict:
    """Nest the keys of a text model in those of the whole model, if the family's releases do."""
    from conf import families

    like = next(one for one in families.tiny().values() if one["architectures"] == config["architectures"])
    if "text_config" not in like:
        return config
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]}
    return like | tied | {"text_config": config | {"model_type": like["text_config"]["model_type"]}}


def make_questions(folder: Path, config: str | None, rows: int) -> None:
    """Write a data set as the Hub has it: questions in words, answers in figures."""
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    place = folder / (config or "data")
    place.mkdir(parents=True)
    lines = []
    for number in range(rows):
        some = [int(digit) for digit in str(123_456_789 + 7919 * number)]  # as long as rows of gsm8k
        asked, said, total = " times ".join(digits[one] for one in some), "", some[0]
        for one in some[1:]:
            said, total = f"{said}{total} times {one} is {total * one}.\n", total * one
        lines.append({"question": f"What is {asked}, step by step?", "answer": f"{said}#### {total}"})
    (place / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    named = f"configs:\n- config_name: {config or 'default'}\n  data_files: {place.name}/*\n"
    (folder / "README.md").write_text(f"---\n{named}---\n")


def make_data(file: Path) -> None:
    from trainer.data.tickets import tickets

    rows = [json.dumps({"input": prompt, "output": team}) for prompt, team in tickets(1600, 13).items()]
    file.write_text("\n".join(rows) + "\n")


@dataclass
class Samples:
    """Samples, a row a second: seconds since the beginning, MiB of the fullest GPU, stages that run."""

    out: Path
    work: Path
    began: float
    gpu: bool
    rows: list[tuple[float, int, tuple[str, ...]]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with self.out.open("w") as file:
            file.write("seconds,gpu_mib,stages\n")
            while not self.over.wait(max(0.0, self.began + len(self.rows) - time.monotonic())):
                row = (time.monotonic() - self.began, gpu_memory(), tuple(stages_running(self.work)))
                self.rows.append(row)
                file.write(f"{row[0]:.1f},{row[1]},{'+'.join(row[2])}\n")
                file.flush()

    def of(self, stage: str) -> list[int]:
        """Numbers of a stage's rows."""
        return [number for number, row in enumerate(self.rows) if stage in row[2]]


def gpu_memory() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    query += ["-i", visible] if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
    with contextlib.suppress(OSError):
        answer = subprocess.run(query, capture_output=True, text=True)
        return max((int(line) for line in answer.stdout.split() if line.isdigit()), default=0)
    return 0


def stages_running(work: Path) -> Iterator[str]:
    """Stages of the flow in this folder that run: a stage is there from the start of its guard to that one's end."""
    from tasks.run import guard  # known by the name that it is started by

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            line = process.cmdline()
            found = re.search(rf"{re.escape(guard.__name__)} .* trainer\.(\w+) ({work}/\S+)", " ".join(line))
            if found and found[1] == "evaluate":
                base = "none.json" in Path(found[2]).read_text()
                yield f"evaluate-{'base' if base else 'tuned'}"
            elif found:
                yield found[1]


def run_flow(conf: str, out: Path, environment: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """Run the flow. Returns its exit code, None where it took too long, and its output."""
    log = out / "flow.log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "flows.finetune", conf]
        flow = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        try:
            code = flow.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            flow.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                flow.wait(20)
            flow.kill()
            flow.wait()
    return code, log.read_text(errors="replace")


def judge(code: int | None, said: str, samples: Samples) -> tuple[list[str], list[str]]:
    """Lines of the report, and problems."""
    wrong = [] if code == 0 else [f"the flow's exit code is {code}"]
    states = dict(re.findall(r"^([a-z-]+) +([A-Z]\w+) +[\d.]+ s", said, re.MULTILINE))
    wrong += [f"{name}: {states.get(name, 'missing')}" for name in STAGES if states.get(name) != "Completed"]
    lines = ["| stage | state | from s | to s | GiB before it | most GiB | beside |", "|---" * 7 + "|"]
    for name in STAGES:
        there = samples.of(name)
        if not there:
            lines.append(f"| {name} | {states.get(name, '')} | | | | | |")
            continue
        beside = {other for number in there for other in samples.rows[number][2]} - {name}
        before = samples.rows[max(0, there[0] - 1)][1]
        most = max(samples.rows[number][1] for number in there)
        at = [samples.rows[there[end]][0] for end in (0, -1)]
        figures = [f"{at[0]:.0f}", f"{at[1]:.0f}", f"{before / 1024:.1f}", f"{most / 1024:.1f}"]
        lines.append("| " + " | ".join([name, states.get(name, ""), *figures, ", ".join(sorted(beside))]) + " |")
    unseen = [name for name in ON_GPU if states.get(name) == "Completed" and not samples.of(name)]
    wrong += [f"{name}: was never seen to run, so nothing is known of what ran beside it" for name in unseen]
    if samples.gpu:
        for seconds, _, running in samples.rows:
            if len(both := [name for name in running if name in ON_GPU]) > 1:
                wrong.append(f"{' and '.join(both)} are on the GPU at once, after {seconds:.0f} s")
                break
        base, trained = samples.of("evaluate-base"), samples.of("train")
        if base and trained and base[-1] >= trained[0]:
            wrong.append("training began before the base's evaluation was over")
    promoted = re.search(r"^\S+ version .*(against|measured).*$", said, re.MULTILINE)
    wrong += [] if promoted else ["no reason why it was promoted or not"]
    waits = re.findall(r"\S+ of \S+ (?:waits for the|has the|begins although).*", said)
    lines += [
        "",
        *dict.fromkeys(waits),
        "",
        promoted[0] if promoted else "",
        *re.findall(r"^held_out/\S+ +\S+ +\S+$", said, re.MULTILINE),
    ]
    return lines, wrong


def time_line(samples: Samples, every: int = 5) -> list[str]:
    """Bars of the most memory of each few seconds."""
    most = max((row[1] for row in samples.rows), default=0) or 1
    found = []
    for first in range(0, len(samples.rows), every):
        some = samples.rows[first : first + every]
        memory, names = max(row[1] for row in some), dict.fromkeys(name for row in some for name in row[2])
        bar = "#" * round(40 * memory / most)
        found.append(f"{some[0][0]:4.0f} s {memory / 1024:6.1f} GiB {bar.ljust(40)} {' '.join(names)}".rstrip())
    return found


def main() -> int:
    options = _arguments()
    sys.path.insert(0, str(ROOT))
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="whole-", dir=options.work, ignore_cleanup_errors=True) as work:
        return _measure(options, Path(work))


def _measure(options: argparse.Namespace, work: Path) -> int:
    began = time.monotonic()
    with (preset if options.preset else made)(options, work) as (conf, environment):
        print(f"model and data are there after {time.monotonic() - began:.1f} s", flush=True)
        return _watch(options, work, conf, environment)


@contextlib.contextmanager
def made(options: argparse.Namespace, work: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Write a model, data and a configuration. Yields the configuration's path, and the environment."""
    make_model(work / "model", of_size(options.size), 0.08 if options.size == "tiny" else 0.02)
    make_data(work / "rows.jsonl")
    conf = work / "whole.yaml"
    kind = dict(gpu="h200", precision="bf16") if has_gpu() else dict(gpu="cpu", precision="fp32")
    layout = dict.fromkeys(WRITTEN, "") if options.auto else WRITTEN
    text = CONF.format(model=work / "model", data=work / "rows.jsonl", steps=options.steps, **kind, **layout)
    conf.write_text(text + ("layout: auto\n" if options.auto else ""))
    yield str(conf), {}


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def _watch(options: argparse.Namespace, work: Path, conf: str, environment: dict[str, str]) -> int:
    own = {"FINETUNE_RUNS": str(work / "runs"), "PREFECT_HOME": str(work / "prefect"), "NO_COLOR": "1"} | environment
    own |= {"PYTHONUNBUFFERED": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    if importlib.util.find_spec("flashinfer") is None:  # vLLM does not start else
        own["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    samples = Samples(options.out / "memory.csv", work, time.monotonic(), has_gpu())
    sampler = threading.Thread(target=samples.run, daemon=True)
    sampler.start()
    without = {name: value for name, value in os.environ.items() if name not in ("FINETUNE_STORE", "PREFECT_API_URL")}
    code, said = run_flow(conf, options.out, without | own, options.seconds)
    samples.over.set()
    sampler.join()
    lines, wrong = judge(code, said, samples)
    used = sum(file.stat().st_size for file in {f.stat().st_ino: f for f in work.rglob("*") if f.is_file()}.values())
    what = f"{options.preset}, {options.layers} layers" if options.preset else f"{options.size}, {options.steps} steps"
    head = f"{what}: {used / 1e9:.1f} GB of disk, {time.monotonic() - samples.began:.0f} s"
    report = [head, "", *lines, "", *time_line(samples), "", *([f"WRONG: {line}" for line in wrong] or ["all right"])]
    (options.out / "whole_flow.txt").write_text("\n".join(report) + "\n")
    print("\n".join(report))
    _keep_logs(work / "runs", options.out / "logs.txt")
    if wrong:
        print(said[-6000:])
    return 1 if wrong else 0


def _keep_logs(folder: Path, out: Path) -> None:
    """Keep the end of the log of every stage."""
    with out.open("w") as file:
        for path in sorted([*folder.rglob("*.log"), *folder.rglob("log*.txt"), *folder.rglob("logs/*")]):
            if path.is_file():
                file.write(f"\n===== {path.relative_to(folder)}\n{path.read_text(errors='replace')[-30000:]}\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--size", choices=SIZES, default="10gb")
    parser.add_argument("--auto", action="store_true", help="leave layout and micro batch to the plan")
    parser.add_argument("--preset", metavar="NAME", help="run this configuration of conf/ instead, as it is")
    parser.add_argument("--layers", type=int, default=8, help="of the preset's model (default 8)")
    parser.add_argument("--rows", type=int, default=7473, help="of the preset's data (default 7473)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1500, help="that the flow may take (default 1500)")
    parser.add_argument("--work", type=Path, help="folder for model and artifacts (default a temporary one)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
