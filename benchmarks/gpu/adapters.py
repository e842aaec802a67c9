"""Serve two adapters of one base at once: whether each answer comes from its own adapter, tokens/s, memory.

    benchmarks/gpu/run adapters.py OUT                                  a packed Qwen3-MoE of real widths, 3 minutes
    benchmarks/gpu/run adapters.py OUT --preset glm45-air-1xh100        all layers of a configuration's model
    python benchmarks/gpu/adapters.py OUT --size tiny --work FOLDER     a packed Qwen3 of 4 layers on a CPU

The base has random weights, packed in int4 by the trainer's commands; --base bf16 serves it as released. With --preset
two layers are packed and the last one is copied until there are as many as in the release. Both adapters are drawn, of
attention and, on a GPU without --preset, of all experts. trainer.serve has memory for one adapter, then for two (with
--preset at once for two). The base scores --rows rows. Each adapter answers --requests questions at once: one alone in
each server, then both together. OUT/adapters.txt has the tokens/s, the room for keys and values, and for each adapter
how far its scores of the questions are from those that it gave alone. Exit code 1 if those of a request are nearer to
the other adapter's.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import serving
import whole_flow

ROOT = Path(__file__).resolve().parents[2]
INDEX = "model.safetensors.index.json"
ATTENTION, RANK, PORT = ("q_proj", "k_proj", "v_proj", "o_proj"), 16, 8123
NAMES = ("one", "two")
Scores = list[float]  # log-probabilities of the tokens of a question
PACKED = ("model.base=int4", "convert.to=packed", "train.precision=bf16", "evaluate.adapter=packed")
CODES = ("export.checkpoint=base", "export.quantization=packed")


def draw(config: dict, folder: Path, seed: int, experts: bool) -> None:
    """Write an adapter of random numbers for all layers of the model."""
    import torch
    from safetensors.torch import save_file

    from conf.model_facts import shapes

    random, tensors = torch.Generator().manual_seed(seed), {}

    def add(module: str, width: int, out: int, count: int = 1) -> None:
        for part, shape in ("A", (count * RANK, width)), ("B", (out, count * RANK)):
            numbers = torch.randn(shape, generator=random) / shape[1] ** 0.5 * (1.0 if part == "A" else 0.5)
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = numbers.to(torch.bfloat16)

    for name, shape in shapes(config).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in ATTENTION:
            add(module, shape[1], shape[0])
        elif experts and module.endswith(".experts.0.up_proj"):
            stack, count = module.removesuffix(".0.up_proj"), config["num_experts"]
            add(f"{stack}.base_layer", shape[1], 2 * shape[0], count)
            add(stack, shape[0], shape[1], count)
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] * experts
    targets = {"target_modules": [*ATTENTION], "target_parameters": stacks}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": RANK, "bias": "none"} | targets))


def deepen(folder: Path, layers: int) -> None:
    """Give the model in this folder so many layers: copies of its last one."""
    from safetensors.torch import load_file, save_file

    config, index = (json.loads((folder / name).read_text()) for name in ("config.json", INDEX))
    last = config["num_hidden_layers"] - 1
    prefix, places = f"model.layers.{last}.", index["weight_map"]
    files = {file for name, file in places.items() if name.startswith(prefix)}
    tensors = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    copied = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    def copy(layer: int) -> dict[str, str]:
        file = f"layer-{layer}.safetensors"
        save_file({f"model.layers.{layer}.{name}": tensor for name, tensor in copied.items()}, folder / file)
        return {f"model.layers.{layer}.{name}": file for name in copied}

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(copy, range(last + 1, layers)):
            places.update(found)
    ignored = config.get("quantization_config", {}).get("ignore", [])
    of_last = [name for name in ignored if f"layers.{last}." in name.replace("\\", "")]
    for layer in range(last + 1, layers):
        ignored += [re.sub(rf"(?<=layers)(\W+){last}(?=\W)", rf"\g<1>{layer}", name) for name in of_last]
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))


def make(options: argparse.Namespace, work: Path, gpu: bool) -> Path:
    """Write base, data and adapters. Returns the folder that vLLM serves."""
    from conf.load import load
    from conf.planner.verdict import config_of
    from trainer.trial import cut

    whole = whole_flow.of_size("3gb") | {"num_hidden_layers": options.layers}
    if options.size == "tiny":
        from trainer.rehearsal import tiny_models

        tiny_models.make_model("qwen3", work / "model")
        whole = json.loads((work / "model/config.json").read_text())
    else:
        if options.preset:
            whole = config_of(load(options.preset))[0] | {"num_nextn_predict_layers": 0}
        whole_flow.make_model(work / "model", cut(whole, 2) if options.preset else whole)
    whole_flow.make_data(work / "rows.jsonl")
    for seed, name in enumerate(NAMES):
        draw(whole, work / name, seed, gpu and options.size != "tiny" and not options.preset)
    kind = dict(length=1024 if gpu else 256, precision="bf16")
    (work / "serving.yaml").write_text(serving.CONF.format(work=work, steps=6, **kind))
    packed = PACKED if options.base == "int4" else ()
    bench = serving.Bench(work, options.out, time.monotonic() + 600)
    for command in ("prepare", "convert", "export") if packed else ("prepare",):
        keys = CODES if command == "export" else ()
        if bench.command(command, command, *packed[: 3 if keys else 4], *keys).code:
            sys.exit(f"{command} has failed: {options.out}/logs")
    model = work / "export/merged" if packed else work / "model"
    if options.preset:
        deepen(model, whole["num_hidden_layers"])
    return model


class Server:
    """trainer.serve of the base with the first `room` adapters."""

    def __init__(self, model: Path, work: Path, out: Path, room: int):
        from contract.served_model import ServedAdapter, ServedModel, stamp

        adapters = [ServedAdapter([name], str(work / name), str(work / "data")) for name in NAMES[:room]]
        where = dict(host="127.0.0.1", port=PORT, kernels=str(work / "kernels"), stamp=stamp(model), room=room)
        sized = [str(work / name) for name in NAMES[:room]]
        served = ServedModel("base", str(model), str(work / "data"), "bf16", **where, adapters=adapters, sized_by=sized)
        served = ServedModel(**vars(served) | {"length": 1024, "gpus": 1})
        served.write(work / "served.json")
        self.began, self.room, self.log = time.monotonic(), room, out / "logs" / f"serve-{room}.log"
        command = [sys.executable, "-m", "trainer.serve", str(work / "served.json")]
        own = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"), "PYTHONPATH": str(ROOT)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdout=log, stderr=log)

    def __enter__(self) -> "Server":
        while self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{PORT}/health", timeout=5).status_code == 200:
                    self.seconds = time.monotonic() - self.began
                    return self
            time.sleep(0.5)
        sys.exit(f"the server has ended: {self.log}")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)

    def ask(self, names: list[str], questions: list[str], tokens: int) -> tuple[dict[str, list[Scores]], float]:
        """Have each adapter answer all questions, sent at once. Returns its scores of the questions, and tokens/s."""
        asked = [(name, question) for question in questions for name in names]

        def one(request: tuple[str, str]) -> Scores:
            content = {"model": request[0], "prompt": request[1], "max_tokens": tokens, "ignore_eos": True}
            content["prompt_logprobs"] = 0
            answer = httpx.post(f"http://127.0.0.1:{PORT}/v1/completions", json=content, timeout=300)
            scored = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"]
            return [value["logprob"] for of_token in scored[1:] for value in of_token.values()]

        began = time.monotonic()
        with ThreadPoolExecutor(len(asked)) as pool:
            scores = list(pool.map(one, asked))
        rate = len(asked) * tokens / (time.monotonic() - began)
        return {name: scores[place :: len(names)] for place, name in enumerate(names)}, rate

    def memory(self) -> str:
        """Memory of the weights and room for keys and values by vLLM's log, and the host's memory of the server."""
        log = self.log.read_text(errors="replace")
        found = re.findall(r"Model loading took ([\d.]+ GiB)", log)[-1:]
        found += [f"{tokens} tokens" for tokens in re.findall(r"KV cache size: ([\d,]+) tokens", log)[-1:]]
        whole = psutil.Process(self.process.pid)
        size = sum(process.memory_info().rss for process in [whole, *whole.children(recursive=True)])
        return ", ".join([*found, f"{size / 2**30:.2f} GiB of the host"])


def apart(one: Scores, other: Scores) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def judge(alone: dict[str, list[Scores]], together: dict[str, list[Scores]]) -> tuple[list[str], int]:
    """A line for each adapter, and the number of requests whose scores are nearer to the other's."""
    lines, wrong = [], 0
    for name, other in zip(NAMES, reversed(NAMES), strict=True):
        own = [*map(apart, together[name], alone[name])]
        others = [*map(apart, together[name], alone[other])]
        swapped = sum(a >= b / 2 for a, b in zip(own, others, strict=True))
        text = f"at most {max(own):.3f} nats a token from itself alone, at least {min(others):.3f} from the other"
        lines.append(f"{name}: {len(own) - swapped} of {len(own)} requests were its own: {text}")
        wrong += swapped
    return lines, wrong


def main() -> int:
    options = _arguments()
    sys.path.insert(0, str(ROOT))
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="adapters-", dir=options.work, ignore_cleanup_errors=True) as work:
        return _measure(options, Path(work))


def _measure(options: argparse.Namespace, work: Path) -> int:
    gpu = serving.gpus_here() > 0
    began = time.monotonic()
    model = make(options, work, gpu)
    what = f"{options.preset or options.size} {options.base} on {'a GPU' if gpu else 'a CPU'}"
    lines = [f"{what}: base {time.monotonic() - began:.0f} s"]
    rows = [json.loads(line)["input"] for line in (work / "rows.jsonl").read_text().splitlines()]
    questions, scored = rows[: options.requests], rows[-options.rows :]
    columns = ("memory for", "answers after s", "memory", f"scores {options.rows} rows in s")
    columns += ("one alone, tokens/s", "both, tokens/s")
    lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    wrong = 0
    for room in (2,) if options.preset else (1, 2):
        with Server(model, work, options.out, room) as server:
            server.ask([NAMES[0]], questions[:4], 4)  # kernels are compiled
            alone, rate = server.ask([NAMES[0]], questions, options.tokens)
            scoring = time.monotonic()
            server.ask(["base"], scored, 1)
            seconds = time.monotonic() - scoring
            row = [f"{room}", f"{server.seconds:.0f}", server.memory(), f"{seconds:.1f}", f"{rate:,.0f}"]
            if room == 2:
                alone |= server.ask([NAMES[1]], questions, options.tokens)[0]
                together, rate = server.ask([*NAMES], questions, options.tokens)
                found, wrong = judge(alone, together)
                lines.append(f"| {' | '.join([*row, f'{rate:,.0f}'])} |")
                lines += ["", *found]
            else:
                lines.append(f"| {' | '.join([*row, ''])} |")
            print(lines[-1], flush=True)
    lines.append(f"WRONG: {wrong} requests" if wrong else "all right")
    (options.out / "adapters.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--size", choices=("tiny", "moe"), default="moe")
    parser.add_argument("--base", choices=("int4", "bf16"), default="int4")
    parser.add_argument("--preset", metavar="NAME", help="serve all layers of this configuration's model instead")
    parser.add_argument("--rows", type=int, default=64, help="that the base scores (64)")
    parser.add_argument("--layers", type=int, default=3, help="of the moe (3)")
    parser.add_argument("--requests", type=int, default=50, help="at once, to each adapter (50)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (64)")
    parser.add_argument("--work", type=Path, help="folder for models (default a temporary one)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
