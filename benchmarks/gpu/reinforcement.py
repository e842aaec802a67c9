"""Measure the phases of reinforcement learning with vLLM and Megatron, and vLLM alone on the same prompts.

    benchmarks/gpu/run reinforcement.py OUT                                  about 9 minutes on one H200, 15 GB of disk
    benchmarks/gpu/run reinforcement.py OUT --rows ipc replay both nccl ahead    the last three on two GPUs
    python benchmarks/gpu/reinforcement.py OUT --size tiny --work FOLDER     rehearses it on a CPU in 3 minutes

A Qwen3-MoE of random weights (trainer.tiny's tokenizer) is converted, and trainer.reinforce trains LoRA on it for some
steps, once for each row: 16 prompts with 16 answers of up to so many tokens. A row has medians of all steps but the
first: seconds of a step, of the transfer and GB/s, those of Megatron-Bridge's export, seconds of the probe, of
answering and tokens/s, of training, nats a token between both and their k3, and GB of the first GPU while vLLM answers
and while it sleeps. Where later transfers repeat the first ones, without Bridge, the transfer and its GB/s are of those
alone. Then vLLM by itself, in a process as its own documentation starts it, answers the prompts of the
last step, and so does it with one thing after another that the loop asks for: a seed for each row, log-probabilities,
no text; on two GPUs where the last row's vLLM was. With two GPUs NCCL's broadcast of 1 GiB is measured beside. Rows of
one GPU are taken on all GPUs side by side.
OUT/reinforcement.txt has the tables, OUT/logs what each printed. Exit code 1 where one fails.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import argparse
import itertools
import json
import os
import queue
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import serving
import whole_flow

ROOT = Path(__file__).resolve().parents[2]
CONF = """\
name: reinforcement
model: {{source: {work}/model}}
data: {{source: {work}/rows.jsonl, seq_length: {length}, template: "{{input}} {{output}}", validation: 0.05,
  test: 0.04}}
adapter: {{rank: 16, alpha: 32}}
hardware: {{gpu: {gpu}}}
train: {{steps: 1, global_batch: 16, micro_batch: {micro_batch}, precision: {precision}}}
optimizer: {{lr: 1e-5, warmup_steps: 0}}
checkpoint: {{save_every: {steps}}}
reinforce: {{steps: {steps}, start: base, prompts: 16, samples: 16, max_tokens: {tokens}, reward: regex, pattern: a,
  lr: 1e-5, held_out: 0, patience: 1000}}
"""
PATHS = ("model", "base", "data")
BOTH = "layout.gpus_per_node=2 layout.ep=2 train.micro_batch=8 reinforce.engine_gpus=2 reinforce.in_turn=true"
ROWS = {  # GPUs, and keys: vLLM and Megatron in turn on one or on both, or vLLM on one of its own
    "ipc": (1, "reinforce.transport=ipc"),
    "gloo": (1, "reinforce.transport=gloo"),
    "files": (1, "reinforce.transport=files"),
    "replay": (1, "reinforce.replay_experts=true"),
    "nccl": (2, "reinforce.engine_gpus=1"),
    "both": (2, BOTH),
    "both-gloo": (2, f"{BOTH} reinforce.transport=gloo"),
    "both-replay": (2, f"{BOTH} reinforce.replay_experts=true"),
    "ahead": (2, "reinforce.engine_gpus=1 reinforce.staleness=1 reinforce.correction=tis"),
}
LINK = """
import os, sys, time, torch
from torch import distributed
rank = int(sys.argv[2])
torch.cuda.set_device(rank)
distributed.init_process_group("nccl", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
data = torch.ones(2**30, dtype=torch.uint8, device="cuda")
best = 0.0
for _ in range(8):
    torch.cuda.synchronize()
    began = time.monotonic()
    distributed.broadcast(data, 0)
    torch.cuda.synchronize()
    best = max(best, data.nbytes / 1e9 / (time.monotonic() - began))
if rank == 0:
    print("MEASURED", best, flush=True)
distributed.destroy_process_group()
"""
COLUMNS = {
    "step s": ("seconds_step", "{:.2f}"),
    "transfer s": ("seconds_transfer", "{:.2f}"),
    "GB/s": ("sent_gb_per_second", "{:.1f}"),
    "export s": ("seconds_export", "{:.2f}"),
    "probe s": ("seconds_probe", "{:.2f}"),
    "generate s": ("seconds_generate", "{:.2f}"),
    "tokens/s": ("generated_tokens_per_second", "{:,.0f}"),
    "sleep s": ("seconds_sleep", "{:.3f}"),
    "train s": ("seconds_train", "{:.2f}"),
    "wait s": ("seconds_wait", "{:.2f}"),
    "journal s": ("seconds_journal", "{:.2f}"),
    "rest s": ("seconds_rest", "{:.2f}"),
    "mismatch": ("mismatch", "{:.1e}"),
    "k3": ("mismatch_k3", "{:.1e}"),
    "GB awake": ("gpu_gb_awake", "{:.1f}"),
    "GB asleep": ("gpu_gb_asleep", "{:.1f}"),
}
OF_TRANSFER = ("seconds_transfer", "sent_gb_per_second")
# What the loop asks vLLM for, one after another.
ASKED = {
    "alone": {},
    "with a seed for each row": {"seeds": True},
    "with log-probabilities": {"logprobs": 0},
    "with both": {"seeds": True, "logprobs": 0},
    "with log-probabilities, flat": {"logprobs": 0, "flat_logprobs": True},
    "with those, and without text": {"logprobs": 0, "flat_logprobs": True, "detokenize": False},
}
ALONE = """
import json, sys, time
given = json.load(open(sys.argv[1]))
def main():
    from vllm import LLM, SamplingParams, TokensPrompt
    llm = LLM(**given["arguments"])
    prompts = [TokensPrompt(prompt_token_ids=one) for one in given["prompts"]]
    for name, asked in given["asked"].items():
        asked = dict(asked)
        seeds = range(len(prompts)) if asked.pop("seeds", False) else [None] * len(prompts)
        settings = [SamplingParams(**given["sampling"], **asked, seed=seed and 1000 * seed + 1) for seed in seeds]
        found = []
        for _ in range(given["repeats"]):
            llm.reset_prefix_cache()
            start = time.monotonic()
            outputs = llm.generate(prompts, settings, use_tqdm=False)
            seconds = time.monotonic() - start
            tokens = sum(len(each.token_ids) for one in outputs for each in one.outputs)
            found.append([seconds, tokens / seconds])
        print("MEASURED", json.dumps([name, *min(found)]), flush=True)
if __name__ == "__main__":
    main()
"""


class Bench:
    def __init__(self, work: Path, out: Path, until: float):
        self.work, self.until = work, until
        self.logs = out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def command(self, name: str, *line: str, gpus: str = "0", **more: str) -> tuple[int, str]:
        """Run a Python command. Returns its code, and what it printed."""
        log = self.logs / f"{name}.log"
        environment = {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        began = time.monotonic()
        with log.open("w") as file:
            run = subprocess.Popen(
                [sys.executable, *line], cwd=ROOT, env=os.environ | environment | more, stdout=file, stderr=file
            )
            try:
                code = run.wait(max(1.0, self.until - time.monotonic()))
            except subprocess.TimeoutExpired:
                run.kill()
                code = run.wait()
        print(f"{name}: code {code}, {time.monotonic() - began:.1f} s", flush=True)
        return code, log.read_text(errors="replace")

    def trainer(self, module: str, name: str, *keys: str, gpus: str = "0") -> int:
        places = [f"paths.{key}={self.work / key}" for key in PATHS]
        places += [f"paths.kernels={self.work}/kernels", f"paths.logs={self.logs / name}"]
        return self.command(name, "-m", module, str(self.work / "reinforcement.yaml"), *places, *keys, gpus=gpus)[0]

    def reinforced(self, name: str, gpus: str) -> list[dict[str, Any]]:
        """Lines of a training's steps, but of its first."""
        folder = self.work / f"reinforced-{name}"
        self.trainer("trainer.reinforce", name, *ROWS[name][1].split(), f"paths.reinforced={folder}", gpus=gpus)
        try:
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        except OSError:
            return []
        lines = [line for line in lines if line["kind"] == "reinforce"]
        for before, line in itertools.pairwise(lines):
            line["seconds_step"] = line["time"] - before["time"]
        return lines[1:]

    def link(self) -> float:
        """GB/s of NCCL's broadcast from the first GPU to the second."""
        (self.work / "link.py").write_text(LINK)
        line = [str(self.work / "link.py"), str(self.work / "link")]
        with ThreadPoolExecutor(2) as both:
            asked = [both.submit(self.command, f"link-{rank}", *line, str(rank), gpus="0,1") for rank in (0, 1)]
        found = re.search(r"^MEASURED (.+)$", asked[0].result()[1], re.MULTILINE)
        return float(found[1]) if found else 0.0

    def alone(self, name: str, options: argparse.Namespace, gpu: bool) -> tuple[str, list[list[Any]]]:
        """What vLLM needs for the prompts of the last step: in vLLM's own way, and each time with more asked for."""
        journal = sorted((self.work / f"reinforced-{name}" / "rollouts").glob("0*.json"))[-1]
        prompts = [group["prompt"] for group in json.loads(journal.read_text())["groups"]]
        # The settings of the loop's vLLM that bear on how fast it is.
        arguments: dict[str, Any] = {"model": str(self.work / "model"), "max_model_len": options.length}
        arguments |= {"max_num_seqs": 256, "disable_log_stats": True, "seed": 1}
        arguments |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.5} if gpu else {"dtype": "float32"}
        if not gpu:
            arguments |= {"enforce_eager": True, "max_num_batched_tokens": 256 * options.length}
        over_both = BOTH in ROWS[name][1]
        arguments |= {"tensor_parallel_size": 2} if over_both else {}
        given = {"arguments": arguments, "prompts": prompts, "asked": ASKED, "repeats": 2}
        given["sampling"] = {"n": 16, "temperature": 1.0, "top_p": 1.0, "max_tokens": options.tokens}
        (self.work / "alone.json").write_text(json.dumps(given))
        (self.work / "alone.py").write_text(ALONE)
        more = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
        more |= {} if gpu else {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
        line = str(self.work / "alone.py"), str(self.work / "alone.json")
        code, said = self.command("alone", *line, gpus="0,1" if over_both else "0", **more)
        found = [json.loads(line.partition(" ")[2]) for line in said.splitlines() if line.startswith("MEASURED ")]
        return ("" if code == 0 else f"vLLM alone: code {code}"), found


def _rows(bench: Bench, names: list[str], gpus: int) -> dict[str, list[dict[str, Any]]]:
    """Steps of each row: those of one GPU on all GPUs side by side, then those of two."""
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for number in range(gpus):
        free.put(str(number))

    def one(name: str) -> list[dict[str, Any]]:
        mine = free.get()
        try:
            return bench.reinforced(name, mine)
        finally:
            free.put(mine)

    with ThreadPoolExecutor(gpus) as pool:
        asked = {name: pool.submit(one, name) for name in names if ROWS[name][0] == 1}
    return {name: asked[name].result() if name in asked else bench.reinforced(name, "0,1") for name in names}


def row(name: str, lines: list[dict[str, Any]]) -> list[str]:
    cells = [name]
    repeated = [line for line in lines if "seconds_export" not in line] or lines
    for key, form in COLUMNS.values():
        values = [line[key] for line in (repeated if key in OF_TRANSFER else lines) if key in line]
        cells.append(form.format(statistics.median(values)) if values else "")
    return cells


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(one)} |" for one in (columns, ["---"] * len(columns), *rows)]


def main() -> int:
    options = _arguments()
    sys.path.insert(0, str(ROOT))
    work = Path(tempfile.mkdtemp(prefix="reinforcement-", dir=options.work))
    try:
        return _measure(options, work, time.monotonic())
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _measure(options: argparse.Namespace, work: Path, began: float) -> int:
    gpu = bool(serving.gpus_here())
    bench = Bench(work, options.out, began + options.seconds)
    size = whole_flow.make_model(work / "model", whole_flow.of_size(options.size))
    whole_flow.make_data(work / "rows.jsonl")
    options.length = 128 + options.tokens
    kind = (
        dict(gpu="h200", precision="bf16", micro_batch=16) if gpu else dict(gpu="cpu", precision="fp32", micro_batch=8)
    )
    text = CONF.format(work=work, steps=options.steps, tokens=options.tokens, length=options.length, **kind)
    (work / "reinforcement.yaml").write_text(text)
    wrong = [name for name in ("prepare", "convert") if bench.trainer(f"trainer.{name}", name)]
    found = {} if wrong else _rows(bench, options.rows, max(1, serving.gpus_here()))
    wrong += [
        f"{name}: no step behind the first was measured: OUT/logs/{name}.log" for name in found if not found[name]
    ]
    lines = [f"{options.size}, {size / 1e9:.2f} GB: 16 prompts, 16 answers of {options.tokens} tokens each", ""]
    lines += table(["row", *COLUMNS], [row(name, each) for name, each in found.items()])
    if gpu and any(ROWS[name][0] == 2 for name in found):
        lines += ["", f"NCCL's broadcast of 1 GiB: {bench.link():.0f} GB/s"]
    usable = [name for name in found if found[name]]
    if usable:
        failed, alone = bench.alone(usable[-1], options, gpu)
        wrong += [failed] if failed else []
        rows = [[name, f"{seconds:.2f}", f"{rate:,.0f}"] for name, seconds, rate in alone]
        lines += ["", *table(["vLLM", "generate s", "tokens/s"], rows)]
        for name in usable if alone else []:
            rate = statistics.median(line["generated_tokens_per_second"] for line in found[name])
            lines.append(f"{name}: {rate / alone[0][2]:.2f} of vLLM alone")
    lines += ["", f"{time.monotonic() - began:.0f} s", *(f"WRONG: {line}" for line in wrong)]
    (options.out / "reinforcement.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--size", choices=("tiny", "3gb", "10gb"), default="3gb")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["ipc", "gloo"], help="default: ipc gloo")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most (default 256)")
    parser.add_argument("--seconds", type=float, default=560, help="after which what runs is ended (default 560)")
    parser.add_argument("--work", type=Path, help="folder for model and checkpoints (default a temporary one)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
