"""Gradients and losses of every layout on two and four GPUs beside those of one: LoRA, DoRA, full; dense, MoE, MLA.

    benchmarks/gpu/run gradients.py OUT [--gpus 4] [--only PART ...] [--without PART ...] [--before] [--seconds 540]
    .venv/bin/python benchmarks/gpu/gradients.py OUT --device cpu --gpus 2        the same rows over gloo, with the
    stand-in

Models of four layers with random weights, adapters with B drawn. In fp32 (no TF32) 20 steps: every piece of every
gradient of the first step, on every rank, and every step's loss, within 1e-4 of one process's. In bf16 one step, whose
gradients are as near to those in fp32, by cosine, as one process in bf16 is. --before leaves
trainer/patches/sequence_parallel.py out: LoRA and DoRA under sp must fail.

One process per GPU lives through all rows of its number of GPUs. A row that takes more than --row-seconds is a row
that hangs: its processes are killed, and others go on with the next. After --seconds no row is begun. Each row is a
line of OUT/rows.jsonl as soon as it is known; OUT/table.txt is the table, OUT/*.log what the processes said.

Transformer Engine has no fp32 attention for packed sequences or over cp: there, in fp32 alone, attention is the CPU
stand-in's, on the GPU. Exit code 0 if every row is as it should be.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportMissingImports=false, reportOptionalMemberAccess=false

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support/ranks")]

BOUND = 1e-4
REPAIR = ("sequence_parallel.give_every_adapter_all_tokens",)  # that --before leaves out
ROUNDING = 2  # how much farther from fp32 than one process in bf16 the gradients of a layout in bf16 may be
DENSE = ("tp=2", "tp=2 sp=true", "tp=4 sp=true", "cp=2", "pp=2 vpp=2", "dp=2")
MOE = (
    "tp=2 sp=true",
    "tp=2 sp=true ep=2",
    "tp=2 sp=true etp=2",
    "tp=4 sp=true",
    "cp=2",
    "pp=2 vpp=2",
    "dp=2",
)
MODELS = {  # the name of a row's model: that of trainer.tiny's kind, and what it is cut into
    "dense": ("llama", DENSE),
    "moe": ("glm4-moe", MOE),
    "mla": ("deepseek-v3", MOE),
}
MLA = "linear_q_down_proj,linear_q_up_proj,linear_kv_down_proj,linear_kv_up_proj"
TARGETS = {
    ("dense", "lora"): "linear_qkv,linear_proj,linear_fc1,linear_fc2",
    ("moe", "lora"): "linear_qkv,linear_proj,linear_fc1,linear_fc2",
    ("mla", "lora"): f"{MLA},linear_proj,linear_fc1,linear_fc2",
    ("dense", "dora"): "linear_qkv,linear_proj,linear_fc1,linear_fc2",
    ("moe", "dora"): "linear_qkv,linear_proj",  # conf/rules/model.py says what DoRA does not fit
    ("mla", "dora"): "linear_q_up_proj,linear_kv_up_proj,linear_proj",
}
CONF = """
name: gradients
model: {source: made by trainer.tiny}
data: {seq_length: 128, template: "{input} {output}"}
adapter: {rank: 8, alpha: 16}
train: {steps: 20, global_batch: 2, precision: fp32}
optimizer: {lr: 1e-3}
checkpoint: {save_every: 20}
"""

MOVED, AFTER = 4, 1e-2  # tokens that may go to another expert in fp32, and what losses may differ by after it


@dataclass(frozen=True)
class Row:
    model: str
    kind: str  # lora, dora, full
    cut: str  # key=value pairs of layout; "" is one process
    packed: bool
    precision: str

    @property
    def name(self) -> str:
        cut = self.cut.replace("=true", "").replace("=", "") or "single"
        return " ".join((self.model, self.kind, cut, *(["packed"] if self.packed else []), self.precision))

    @property
    def world(self) -> int:
        cut = dict(pair.split("=") for pair in self.cut.split())
        return max(int(cut.get(key, 1)) for key in ("tp", "cp", "pp", "dp"))

    @property
    def reference(self) -> "Row":
        return Row(self.model, self.kind, "", self.packed, self.precision)

    @property
    def exact(self) -> "Row":
        return Row(self.model, self.kind, "", self.packed, "fp32")

    @property
    def fails_before(self) -> bool:
        return self.kind != "full" and "sp=true" in self.cut


def rows() -> list[Row]:
    """Rows to be measured. Those that show most come first."""
    return [
        Row(model, kind, cut, packed, precision)
        for precision in ("fp32", "bf16")
        for packed in (False, True)
        for kind in ("lora", "dora", "full")
        for model, (_, cuts) in MODELS.items()
        for cut in cuts
    ]


def main() -> int:
    options = _arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    asked = [row for row in rows() if row.world <= options.gpus]
    asked = [row for row in asked if {*options.only} <= {*row.name.split()}]
    asked = [row for row in asked if not {*options.without} & {*row.name.split()}]
    if not asked:
        sys.exit(f"error: no row is called {' '.join(options.only)}")
    _environment(options.device)
    with tempfile.TemporaryDirectory(prefix="gradients-") as temporary:
        folder = options.workdir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = Rehearsal(options, folder.absolute()).run(asked)
    table = "\n".join(_table(asked, results, options.before))
    (options.out / "table.txt").write_text(table + "\n")
    print(table, flush=True)
    return 0 if all(_as_it_should_be(row, results.get(row), options.before) for row in asked) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for results")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="such as: moe sp fp32")
    parser.add_argument("--without", nargs="*", default=[], metavar="PART", help="such as: packed bf16")
    parser.add_argument("--before", action="store_true", help="without the repair")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=540, help="no row begins after so many")
    parser.add_argument("--row-seconds", type=float, default=60)
    parser.add_argument("--workdir", type=Path, help="keep models, data and references here, and use them again")
    parser.add_argument(
        "--spawn", action="store_true", help="on a CPU: processes that import for themselves, as on GPUs"
    )
    return parser.parse_args()


def _environment(device: str) -> None:
    os.environ.update(
        NVIDIA_TF32_OVERRIDE="0",
        CUDA_DEVICE_MAX_CONNECTIONS="1",
        NCCL_NVLS_ENABLE="0",
        TORCHDYNAMO_DISABLE="1",  # compiling takes longer than all rows
        OMP_NUM_THREADS="1",
        LOCAL_WORLD_SIZE=str(os.cpu_count()),
    )
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


class Rehearsal:
    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder = options, folder
        self.started = time.monotonic()
        self.results: dict[Row, dict[str, Any]] = {}
        self.spawns = options.device == "gpu" or options.spawn

    def run(self, asked: list[Row]) -> dict[Row, dict[str, Any]]:
        references = list(dict.fromkeys(one for row in asked for one in (row.exact, row.reference)))
        phases = {1: references} | {world: [row for row in asked if row.world == world] for world in (4, 2)}
        if not self.spawns:
            self._prepare(asked)
            _import_all()
        # Where processes import for themselves they begin to at once, those that are needed last too.
        teams = {world: self._teams(world, phase) if self.spawns else [] for world, phase in phases.items()}
        if self.spawns:
            self._prepare(asked)
        for world, phase in phases.items():
            ready = [row for row in phase if row.world == 1 or (self._known(row.reference) and self._known(row.exact))]
            for row in phase:
                if row not in ready:
                    self._note(row, {"error": "no reference"})
            self._phase(teams[world] or self._teams(world, ready), ready)
        return self.results

    def _teams(self, world: int, todo: list[Row]) -> list["Team"]:
        # Two references share a GPU: they wait for the host most of the time.
        places = [range(i, i + world) for i in range(0, self.options.gpus - world + 1, world)]
        places = places * 2 if world == 1 and self.spawns else places
        return [Team(self, list(place)) for place in places[: len(todo)]]

    def _prepare(self, asked: list[Row]) -> None:
        """Prepare models, converted on the CPU, and their data."""
        from gradients_of_run import make_data

        from conf.load import load
        from trainer.data import prepared
        from trainer.rehearsal import tiny_models

        (self.folder / "conf.yaml").write_text(CONF)
        if not (self.folder / "given").exists():
            make_data(self.folder / "given")
        conversions = []
        models = {name: kind for name, (kind, _) in MODELS.items() if any(row.model == name for row in asked)}
        for name, kind in models.items():
            if (self.folder / name).exists():
                continue
            # Four key-value heads, over four tensor ranks.
            tiny_models.KINDS[name] = tiny_models.KINDS[kind] | {"num_key_value_heads": 4}
            tiny_models.make_model(name, self.folder / name, dtype="float32")
            command = [sys.executable, "-m", "trainer.convert", str(self.folder / "conf.yaml")]
            command += [*self._paths(name), f"paths.output={self.folder / name}-convert"]
            with (self.options.out / f"convert-{name}.log").open("w") as log:
                environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(_path())}
                started = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            conversions.append(started)
            if self.options.device == "cpu":
                started.wait()
        for name in models:
            for packed in sorted({row.packed for row in asked}):
                run = load(self.folder / "conf.yaml", [*self._paths(name), f"data.packed={str(packed).lower()}"])
                place = self.folder / f"{name}-data{'-packed' * packed}"
                given = {"data": str(self.folder / "given"), "output": str(place)}
                prepared.make(run.model_copy(update={"paths": run.paths.model_copy(update=given)}))
        if any(conversion.wait() for conversion in conversions):
            sys.exit(f"error: a conversion failed, see {self.options.out}/convert-*.log")
        print(f"{self._seconds():6.1f} s  models and data are ready", flush=True)

    def _paths(self, model: str) -> list[str]:
        return [f"paths.model={self.folder / model}", f"paths.base={self.folder / model}-base"]

    def _known(self, reference: Row) -> bool:
        return reference_file(self.folder, reference, self.options.steps).exists()

    def _phase(self, teams: list["Team"], todo: list[Row]) -> None:
        waiting = list(reversed(todo))
        if todo and todo[0].world == 1:
            waiting = [row for row in waiting if not self._known(row)]
        while True:
            for team in teams:
                if waiting and not team.row and self._seconds() < self.options.seconds:
                    team.give(waiting.pop())
            busy = [team for team in teams if team.row]
            if not busy:
                break
            wait([pipe for team in busy for pipe in team.pipes], timeout=0.2)
            for team in busy:
                result = team.look()
                if result:
                    self._note(team.row, result)
                    team.row = None
        for row in reversed(waiting):
            self._note(row, {"error": "not begun: out of time"})
        for team in teams:
            team.end()

    def _note(self, row: Row, result: dict[str, Any]) -> None:
        self.results[row] = result
        with (self.options.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps({"row": row.name, "before": self.options.before, **result}) + "\n")
        print(f"{self._seconds():6.1f} s  {_line(row, result)}", flush=True)

    def _seconds(self) -> float:
        return time.monotonic() - self.started


class Team:
    """Team of processes, one per GPU, that train one row after the other."""

    def __init__(self, rehearsal: Rehearsal, gpus: list[int]):
        self.rehearsal, self.gpus = rehearsal, gpus
        self.row: Row | None = None
        self.start()

    def start(self) -> None:
        options = self.rehearsal.options
        context = multiprocessing.get_context("spawn" if self.rehearsal.spawns else "fork")
        descriptor, meeting = tempfile.mkstemp(prefix="meeting-", dir=self.rehearsal.folder)
        os.close(descriptor)
        self.pipes, self.processes = [], []
        for rank in range(len(self.gpus)):
            mine, theirs = context.Pipe()
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(self.gpus)),
                "MEETING": f"file://{meeting}",  # a port that is free now may be taken when the first row begins
            }
            if options.device == "gpu":
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
            log = options.out / f"world{len(self.gpus)}-gpu{self.gpus[rank]}.log"
            arguments = (theirs, environment, log, self.rehearsal.folder, options)
            process = context.Process(target=_member, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        self.fresh = True

    def give(self, row: Row) -> None:
        if not self.processes:
            self.start()
        self.row, self.answers, self.began = row, {}, time.monotonic()
        self.deadline = self.began + self.rehearsal.options.row_seconds * (3 if self.fresh else 1)
        self.fresh = False
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # it has died: look() sees that
                pipe.send(row)

    def look(self) -> dict[str, Any] | None:
        """Result of the row, once it is known."""
        gone = False
        for rank, pipe in enumerate(self.pipes):
            try:
                while rank not in self.answers and pipe.poll():
                    self.answers[rank] = pipe.recv()
            except (EOFError, OSError):
                gone = True
        seconds = {"seconds": round(time.monotonic() - self.began, 1)}
        failed = [answer["error"] for answer in self.answers.values() if "error" in answer]
        if len(self.answers) == len(self.pipes):
            return (self.answers[0] if not failed else {"error": failed[0]}) | seconds
        if failed:  # the others may wait for it for ever; most fail themselves
            self.deadline = min(self.deadline, time.monotonic() + 10)
        if gone or time.monotonic() > self.deadline:
            self.end()
            error = failed[0] if failed else "a process died" if gone else "hangs"
            return {"error": error} | seconds
        return None

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []


def _member(pipe, environment: dict[str, str], log: Path, folder: Path, options: argparse.Namespace) -> None:
    os.environ.update(environment)
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    _import_all()
    os.environ["LOCAL_WORLD_SIZE"] = environment["WORLD_SIZE"]
    while True:
        try:
            row = pipe.recv()
        except EOFError:
            return
        print(f"===== {row.name}", flush=True)
        try:
            answer = _train(row, folder, options)
        except BaseException as error:
            traceback.print_exc()
            answer = {
                "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"
            }
        sys.stdout.flush()
        pipe.send(answer)


def _path() -> Iterator[str]:
    yield str(ROOT)
    yield from filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def _import_all() -> None:
    from trainer.rehearsal import forked_ranks

    forked_ranks.import_all()
    _keep_groups()


def _keep_groups() -> None:
    """Keep communicators that a row has made, so that they serve the rows after it."""
    from megatron.core import parallel_state

    make, made = parallel_state.create_group, {}

    def create_group(ranks=None, timeout=None, backend=None, pg_options=None, use_local_synchronization=False, **more):
        key = (tuple(ranks) if ranks is not None else None, backend, str(sorted(more.items())))
        if key not in made:
            made[key] = make(ranks, timeout, backend, pg_options, use_local_synchronization, **more)
        return made[key]

    parallel_state.create_group = create_group


def _train(row: Row, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    import gc

    import torch
    from gradients_of_run import compare

    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # Megatron sets them by the first model's precision and refuses others
    steps = options.steps if row.precision == "fp32" else 1
    run = _run(row, folder, steps)
    if options.before:  # lean adapters have nothing to repair there
        run = run.model_copy(update={"adapter": run.adapter.model_copy(update={"lean": False})})
    plain = options.device == "gpu" and row.precision == "fp32" and (row.packed or "cp=" in row.cut)
    exact = reference_file(folder, row.exact, options.steps) if row.precision == "bf16" and row.cut else None
    with _stand_in_attention() if plain else contextlib.nullcontext():
        found = compare(
            run, reference_file(folder, row.reference, options.steps), REPAIR if options.before else (), exact
        )
    gc.collect()
    if options.device == "gpu":
        torch.cuda.empty_cache()
    return found


def reference_file(folder: Path, reference: Row, steps: int) -> Path:
    return folder / f"{reference.name.replace(' ', '-')}-{steps}.pt"


def _run(row: Row, folder: Path, steps: int):
    from conf.load import load

    cut = dict(pair.split("=") for pair in row.cut.split())
    cut.pop("dp", None)
    adapter = "none" if row.kind == "full" else row.kind
    settings = [
        f"paths.model={folder / row.model}",
        f"paths.base={folder / row.model}-base",
        f"paths.data={folder / (row.model + '-data' + '-packed' * row.packed)}/data",
        f"paths.output={folder / row.name.replace(' ', '-')}",
        f"layout.gpus_per_node={row.world}",
        f"data.packed={str(row.packed).lower()}",
        f"train.precision={row.precision}",
        f"train.steps={steps}",
        f"checkpoint.save_every={steps}",
        f"adapter.kind={adapter}",
        *(f"layout.{key}={value}" for key, value in cut.items()),
    ]
    if adapter != "none":
        settings.append(f"adapter.targets=[{TARGETS[row.model, row.kind]}]")
    return load(folder / "conf.yaml", settings)


@contextlib.contextmanager
def _stand_in_attention():
    import importlib.util

    import torch
    import transformer_engine.pytorch as te
    from torch.nn.attention import SDPBackend, sdpa_kernel

    path = ROOT / "trainer/startup/cpu/stand_in/transformer_engine/pytorch/attention.py"
    spec = importlib.util.spec_from_file_location("stand_in_attention", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def forward(self, query, key, value, *arguments, **named):
        stand_in = module.DotProductAttention(
            query.shape[-2],
            query.shape[-1],
            attn_mask_type=self.attn_mask_type,
            cp_group=self.cp_group,
            softmax_scale=self.softmax_scale,
        )
        with torch.device("cuda"), sdpa_kernel(SDPBackend.MATH):
            return stand_in.forward(query, key, value, *arguments, **named)

    real, te.DotProductAttention.forward = te.DotProductAttention.forward, forward
    try:
        yield
    finally:
        te.DotProductAttention.forward = real


def _is_right(row: Row, result: dict[str, Any]) -> bool:
    if "gradient" not in result:
        return False
    if row.precision == "bf16":
        # as near to the gradient in fp32 as one process in bf16 is: rounding sends some tokens to other experts
        return 1 - result["exact_cosine"] <= ROUNDING * (1 - result["single_cosine"])
    routed = not result["moved"] or (
        result["same_routes"] and result["moved"] <= MOVED and result["loss_after"] <= AFTER
    )
    return result["gradient"]["difference"] <= BOUND and result["loss"] <= BOUND and bool(routed)


def _as_it_should_be(row: Row, result: dict[str, Any] | None, before: bool) -> bool:
    if result is None or "gradient" not in result:
        return False
    if before and row.precision == "bf16" and row.fails_before:
        return True  # shown, and not judged
    return _is_right(row, result) != (before and row.fails_before)


def _line(row: Row, result: dict[str, Any]) -> str:
    start = f"{row.name:40} {result.get('seconds', 0):5.1f} s"
    if "error" in result:
        return f"{start}  FAILED: {result['error']}"
    if "gradient" not in result:
        return f"{start}  reference"
    gradient, cosine = result["gradient"], result["cosine"]
    if row.precision == "bf16":
        text = f"cosine with fp32 {result['exact_cosine']:.6f}, of one process {result['single_cosine']:.6f}; "
        text += f"with one process in bf16 {result['whole_cosine']:.6f}, least {cosine['cosine']:.4f} {cosine['name']}"
    else:
        text = f"gradient {gradient['difference']:.1e} {gradient['name']}, loss {result['loss']:.1e}"
        if result["moved"]:
            text += f" ({result['moved']:.0f} tokens to other experts from step {result['same_routes'] + 1} on, "
            text += f"then {result['loss_after']:.1e})"
    return f"{start}  {'ok  ' if _is_right(row, result) else 'OFF '}  {text}"


def _table(asked: list[Row], results: dict[Row, dict[str, Any]], before: bool) -> list[str]:
    lines = []
    for row in asked:
        result = results.get(row, {"error": "not begun"})
        surprise = "" if _as_it_should_be(row, result, before) else "  <-- NOT AS IT SHOULD BE"
        lines.append(_line(row, result) + surprise)
    wrong = sum("<--" in line for line in lines)
    rule = "with the repair left out" if before else "with the repair"
    return [*lines, f"{len(lines)} rows {rule}: {len(lines) - wrong} as they should be, {wrong} not"]


if __name__ == "__main__":
    sys.exit(main())
