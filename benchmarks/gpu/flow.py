"""Run the flow of the tiny model on this host's GPU, undisturbed and with faults, and report how each run ended.

    benchmarks/gpu/run flow.py OUT [--only PART ...] [--precision fp32]     10 minutes on one H200
    python benchmarks/gpu/flow.py OUT --device cpu --only whole killed      rehearses it on a CPU

    whole      all eight stages: they complete, the model answers as well as on a CPU, and passes the parity gate
    again      the same configuration: every stage is cached
    two        two flows at once that need the same GPU: one trains; the other waits and names it
    killed     the tuned model's evaluation is killed: it is retried automatically, without training again
    full       another program has the GPU's memory while the base is evaluated: one line says so; then it continues
    beside     on two GPUs, the base is evaluated during training

OUT/flow.txt has a row per case, OUT/NAME.log the output of each run, OUT/memory.csv the memory of each GPU per second.
All runs share one store, so a case runs only its own stages; --work keeps the store. CUDA_VISIBLE_DEVICES is obeyed.
Exit code 1 if a case did not end as it should.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("download", "prepare", "convert", "evaluate-base", "train", "export", "evaluate-tuned", "promote")
SECONDS = 400  # most that a run may take
AS_WELL = 0.95  # share of answers that are right; on a CPU all are
CONF = """\
name: flow
model: {{source: "tiny://glm4-moe"}}
data: {{source: "tiny://tickets", seq_length: 64, template: "{{input}} {{output}}", validation: 0.04, test: 0.04}}
adapter: {{rank: 16, alpha: 32}}
hardware: {{gpu: {gpu}, gate: warn}}
train: {{steps: 100, global_batch: 16, micro_batch: 16, precision: {precision}, validate_every: 50}}
optimizer: {{lr: 5e-3, warmup_steps: 5}}
checkpoint: {{save_every: 50}}
evaluate: {{max_tokens: 8{gpus}}}
"""
# All of the GPU's memory but 8 GB, until its standard input ends.
GREEDY = """\
import sys, torch
kept = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range((torch.cuda.mem_get_info()[0] >> 30) - 8)]
print(len(kept), flush=True)
sys.stdin.read()
"""


@dataclass
class Flow:
    """A run of the flow, which another thread may disturb."""

    name: str
    place: "Place"
    changes: tuple[str, ...] = ()
    code: int | None = None
    seconds: float = 0.0
    process: subprocess.Popen | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        return self.place.out / f"{self.name}.log"

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def start(self) -> "Flow":
        command = [sys.executable, "-m", "flows.finetune", str(self.place.conf), *self.changes]
        home = {"PREFECT_HOME": str(self.place.work / f"prefect-{self.name}")}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self.place.environment | home, stdout=file, stderr=file
            )
        self.seconds = -time.monotonic()
        return self

    def end(self) -> "Flow":
        assert self.process
        try:
            self.code = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.process.kill()
            self.process.wait()
        self.seconds += time.monotonic()
        return self

    def run(self) -> "Flow":
        return self.start().end()

    @property
    def states(self) -> dict[str, str]:
        return dict(re.findall(r"^([a-z-]+) +([A-Z]\w+)(?: +[\d.]+ s| *$)", self.said, re.MULTILINE))

    def find(self, pattern: str) -> str:
        found = re.search(pattern, self.said, re.MULTILINE)
        return found[0] if found else ""


@dataclass
class Place:
    """Where all runs are made, and what they are made from."""

    out: Path
    work: Path
    gpu: bool
    precision: str
    gpus: int = 0

    @property
    def conf(self) -> Path:
        return self.work / "flow.yaml"

    @property
    def environment(self) -> dict[str, str]:
        left = ("FINETUNE_STORE", "PREFECT_API_URL")
        made = {name: value for name, value in os.environ.items() if name not in left}
        made |= {"FINETUNE_RUNS": str(self.work / "runs"), "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
        made |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        if importlib.util.find_spec("flashinfer") is None:  # vLLM does not start else
            made["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if self.gpus == 1:
            made["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        return made

    def write(self) -> None:
        kind = dict(gpu="h200", gpus=", gpus: 1") if self.gpu else dict(gpu="cpu", gpus="")
        self.conf.write_text(CONF.format(precision=self.precision, **kind))


def whole(place: Place) -> Iterator[str]:
    flow = Flow("whole", place).run()
    yield from ended(flow, dict.fromkeys(STAGES, "Completed"))
    right = re.search(r"^held_out/exact_match +(\S+) +(\S+)$", flow.said, re.MULTILINE)
    if not right or float(right[2]) < AS_WELL:
        yield f"exact match {right[2] if right else 'missing'}, and {AS_WELL} is asked for"
    if not flow.find(r"^flow version .*champion.*"):
        yield "it was not promoted"
    print(f"    {flow.find('^held_out/exact_match.*')}; {flow.find('parity: [0-9]+ prompts.*')}")


def again(place: Place) -> Iterator[str]:
    flow = Flow("again", place).run()
    yield from ended(flow, dict.fromkeys(STAGES, "Cached"))


def two(place: Place) -> Iterator[str]:
    """One GPU for both, whatever the host has."""
    alone = Place(place.out, place.work, place.gpu, place.precision, gpus=1)
    flows = [Flow(f"two-{seed}", alone, (f"train.seed={seed}", "--until", "train")).start() for seed in (2, 3)]
    waits = []
    for flow in flows:
        yield from ended(flow.end(), {"evaluate-base": "Cached", "train": "Completed"})
        waits += re.findall(r"train of \S+ (?:waits for .*|has GPU .* after .*)", flow.said)
    if place.gpu and not any("waits for" in line for line in waits):
        yield "none of them waited"
    print("".join(f"    {line}\n" for line in waits), end="")


def killed(place: Place) -> Iterator[str]:
    flow = Flow("killed", place, ("train.seed=2", "--until", "evaluate-tuned")).start()
    struck = strike("trainer.evaluate", place.work, SECONDS)
    yield from ended(flow.end(), {"train": "*", "evaluate-tuned": "Completed"})
    retries = re.findall(r"Task run failed with exception: .*Retry \d+/\d+.*", flow.said)
    if not struck or len(retries) != 1:
        yield f"{len(retries)} retries" if struck else "no evaluation was seen to run"
    trained = len(re.findall(r"step 1/100 ", flow.said))
    if trained > 1:
        yield f"trained {trained} times"
    print("".join(f"    {line[:160]}\n" for line in retries), end="")


def full(place: Place) -> Iterator[str]:
    if not place.gpu:
        return
    alone = Place(place.out, place.work, place.gpu, place.precision, gpus=1)
    changes = ("evaluate.max_tokens=9", "--until", "evaluate-base")
    environment = alone.environment
    greedy = subprocess.Popen(
        [sys.executable, "-c", GREEDY], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert greedy.stdin and greedy.stdout
    greedy.stdout.readline()
    flow = Flow("full", alone, changes).run()
    greedy.stdin.close()
    greedy.wait()
    if flow.states.get("evaluate-base") != "Failed":
        yield f"evaluate-base is {flow.states.get('evaluate-base')} although the GPU's memory was taken"
    line = flow.find(r"^error: .*")
    if "memory" not in line:
        yield f"the last line says nothing of memory: {line[:200]}"
    print(f"    {line[:240]}")
    yield from ended(Flow("full-again", alone, changes).run(), {"prepare": "Cached", "evaluate-base": "Completed"})


def beside(place: Place) -> Iterator[str]:
    flow = Flow("beside", place, ("evaluate.max_tokens=10", "train.seed=5", "--until", "train")).run()
    yield from ended(flow, {"evaluate-base": "Completed", "train": "Completed"})
    rows = [line.split(",") for line in (place.out / "memory.csv").read_text().splitlines()[1:]]
    began = time.monotonic() - flow.seconds
    both = sum(1 for row in rows if float(row[0]) > began and sum(int(used) > 1024 for used in row[1:]) > 1)
    if place.gpu and both < 3:
        yield f"both GPUs were in use for {both} s"
    print(f"    both GPUs in use for {both} s of {flow.seconds:.0f}")


CASES: dict[str, Callable[[Place], Iterator[str]]] = dict(
    whole=whole, again=again, two=two, killed=killed, full=full, beside=beside
)


def ended(flow: Flow, states: dict[str, str]) -> Iterator[str]:
    """Return the problems of the flow's end. `*` stands for both ways to get an artifact."""
    if flow.code != 0:
        yield f"{flow.name}: exit code {flow.code}: {flow.find('^error: .*')[:300]}"
    for stage, wanted in states.items():
        state = flow.states.get(stage, "missing")
        if state != wanted and not (wanted == "*" and state in ("Cached", "Completed")):
            yield f"{flow.name}: {stage} is {state}, not {wanted}"


def strike(module: str, work: Path, seconds: float) -> bool:
    """Kill the first process of this command that works below this folder, 5 s after its start."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if line[1:3] == ["-m", module] and any(str(work) in word for word in line):
                    time.sleep(5)
                    process.kill()
                    return True
        time.sleep(0.5)
    return False


def sample(file: Path, over: threading.Event) -> None:
    """Write the MiB in use on each GPU, a row a second."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with file.open("w") as out:
        out.write("clock,mib of each gpu\n")
        while not over.wait(1.0):
            answer = ""
            with contextlib.suppress(OSError):
                answer = subprocess.run(query, capture_output=True, text=True).stdout
            out.write(",".join([f"{time.monotonic():.1f}", *answer.split()]) + "\n")
            out.flush()


def main() -> int:
    options = _arguments()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    work = options.work or Path(tempfile.mkdtemp(prefix="flow-"))
    work.mkdir(parents=True, exist_ok=True)
    place = Place(out, work, options.device == "gpu", options.precision)
    place.write()
    over = threading.Event()
    sampler = threading.Thread(target=sample, args=(out / "memory.csv", over), daemon=True)
    sampler.start()
    rows = []
    try:
        for name in options.only or CASES:
            began = time.monotonic()
            wrong = list(CASES[name](place))
            rows.append(f"{name:8} {time.monotonic() - began:5.0f} s  {'; '.join(wrong) or 'as it has to be'}")
            print(rows[-1], flush=True)
            (out / "flow.txt").write_text("\n".join(rows) + "\n")
    finally:
        over.set()
        sampler.join()
        if not options.work:
            shutil.rmtree(work, ignore_errors=True)
    return 0 if all(row.endswith("as it has to be") for row in rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the results")
    parser.add_argument("--only", nargs="*", choices=CASES, default=[], metavar="PART", help=", ".join(CASES))
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--work", type=Path, help="folder of the store, kept (default: a temporary one)")
    options = parser.parse_args()
    if options.device == "cpu":
        options.precision = "fp32"
    return options


if __name__ == "__main__":
    sys.exit(main())
