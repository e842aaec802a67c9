"""Compare a training step with a plain loop of transformers and PEFT: the same model, tokens and GPU.

    benchmarks/gpu/run peers.py OUT [--only NAME ...] [--minutes M]
    python benchmarks/gpu/peers.py OUT --only tiny                       rehearses it on a CPU
    python benchmarks/gpu/peers.py --list                                rows, and the planned figures of our side

"ours" is python -m trainer.trial. "theirs" is this file with --loop SPEC.json: the text model of the same config.json
with random weights, sdpa attention, grouped_mm for experts, LoRA of the same rank in bf16, fused AdamW, and as many
tokens a step. Its layers are recomputed if ours are. A micro batch that does not fit is halved. Steps are the median
after the first two, GB the most that torch has allocated. A ratio above 1 means that ours is faster.

The loop adapts all linear layers that PEFT accepts. transformers keeps the experts of a layer in one tensor, so the
table has two lines for such a model: without adapters of experts, and with PEFT's target_parameters. Our experts share
one adapter.

Liger's kernels are used if they are importable and know the model, except those of experts: they compute gradients of
frozen weights. Packages that the environment lacks can be in the folder of PEERS_SITE, which is searched last:

    uv pip install --target FOLDER --no-deps peft accelerate liger-kernel

OUT/peers.json gets each result as it ends, OUT/peers.txt the table. After M minutes nothing begins, and what runs ends.
"""

import argparse
import gc
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plan import ROOT, Trial, answer, are_there, planned

LIMIT = 300  # seconds of a process
WARM = 2  # steps that are not measured, as in a trial
LONG = 60  # seconds after which no further step is measured
KERNELS = ("causal_conv1d_fn", "chunk_gated_delta_rule", "mamba_chunk_scan_combined")  # None in transformers if absent
MAMBA_REFUSES = "out_proj"  # linear layers of nemotron_h that PEFT refuses to adapt
QWEN35 = "model.mtp=false data.seq_length"  # transformers has no layer of multi-token prediction
QWEN3_4K = "data.packed=true data.seq_length=4096 train.global_batch=16"
ROWS = (
    Trial("qwen3.5-35b 6 x 4k", "full", "qwen35-35b-1xh100", None,
          f"{QWEN35}=4096 train.micro_batch=6 train.global_batch=6"),
    Trial("qwen3.5-35b 3 x 8k", "full", "qwen35-35b-1xh100", None,
          f"{QWEN35}=8192 train.micro_batch=3 train.global_batch=3"),
    Trial("gemma4-26b 8 x 8k", "full", "gemma4-26b-1xh100", None, "data.packed=true"),
    Trial("gemma3-27b 16 x 4k", "cut", "gemma3-27b-1xh100", 12, "data.packed=true"),
    Trial("nemotron3-nano 4 x 16k", "full", "nemotron3-nano-1xh100", None, "data.packed=true"),
    Trial("qwen3-30b 8 x 8k", "full", "qwen3-30b-a3b-1xh100", None, "data.packed=true"),
    Trial("qwen3-30b 16 x 4k", "full", "qwen3-30b-a3b-1xh100", None, f"{QWEN3_4K} train.micro_batch=4"),
    Trial("qwen3-30b 32 x 2k", "full", "qwen3-30b-a3b-1xh100", None,
          "data.packed=true data.seq_length=2048 train.micro_batch=8 train.global_batch=32"),
    Trial("qwen3-30b attention 16 x 4k", "full", "qwen3-30b-a3b-1xh100", None,
          f"{QWEN3_4K} train.micro_batch=4 adapter.targets=[linear_qkv,linear_proj]"),
    Trial("llama3.1-8b 16 x 4k", "full", "llama31-8b-1xh100", None, "data.packed=true"),
    # 49 and 21 GB of weights in bf16, which leaves room for logits without Liger
    Trial("qwen3.5-35b 6 x 4k", "cut", "qwen35-35b-1xh100", 28,
          f"{QWEN35}=4096 train.micro_batch=6 train.global_batch=6"),
    Trial("gemma4-26b 8 x 8k", "cut", "gemma4-26b-1xh100", 12, "data.packed=true"),
    Trial("tiny", "rehearsal", "tiny", None, "train.micro_batch=4 train.global_batch=8"),
)  # fmt: skip


def main() -> int:
    options = _arguments()
    sys.path[0] = str(ROOT)  # instead of this folder: its kernels.py is not the package that transformers looks for
    if options.loop:
        print(json.dumps(loop(json.loads(options.loop.read_text()))))
        return 0
    only = options.only or ["full", "cut"]
    chosen = [one for one in ROWS if any(part in f"{one.group} {label(one)}" for part in only)]
    if options.list:
        print("\n".join(f"{label(one):32} {planned(one)}" for one in chosen))
        return 0
    if any(one.group != "rehearsal" for one in chosen) and not are_there(1):
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    rows, until = [], time.monotonic() + options.minutes * 60
    for one in chosen:
        rows.append({"name": label(one), "conf": one.conf, "changes": one.changes, "theirs": []})
        for key, command, its in sides(one, options.out):
            if (left := until - time.monotonic()) < LONG:
                break
            offline = {"HF_HUB_OFFLINE": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
            result = its | figures(answer(command, offline, min(LIMIT, left)))
            rows[-1][key] = result if key == "ours" else [*rows[-1][key], result]
            (options.out / "peers.json").write_text(json.dumps(rows, indent=1) + "\n")
            (options.out / "peers.txt").write_text(table(rows))
        print(table(rows[-1:]), flush=True)
    return 0 if any("ours" in row for row in rows) else 1


def label(one: Trial) -> str:
    return f"{one.name}, {one.layers} layers" if one.layers else one.name


def sides(one: Trial, out: Path) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Yield a row's runs, as side, command and known figures: ours, theirs, and theirs with adapters of experts."""
    from conf import families
    from conf.load import load
    from conf.model_facts import facts_from_hf
    from conf.planner.verdict import config_of
    from trainer.trial import cut

    run = load(one.conf, [f"{key}={value}" for key, value in one.overrides.items()], illegal=True)
    config, _ = config_of(run)
    text = families.as_text(cut(config, one.layers) if one.layers else config)
    tokens = run.train.global_batch * run.data.seq_length
    base = run.model.base
    yield "ours", one.command, {"tokens": tokens, "remark": "" if base == "bf16" else f"our base in {base}"}
    spec = {"config": text, "rank": run.adapter.rank, "alpha": run.adapter.alpha, "length": run.data.seq_length}
    spec |= {"micro_batch": run.train.micro_batch, "rows": run.train.global_batch, "steps": one.steps}
    spec |= {"dtype": "float32" if run.train.precision == "fp32" else "bfloat16"}
    spec |= {"recompute": run.train.recompute != "none"}
    adapted_experts = bool(facts_from_hf(config).experts) and "linear_fc1" in run.adapter.names
    for experts in (False, True)[: 1 + adapted_experts]:
        file = out / f"{label(one)}{' experts' * experts}.json".replace(" ", "-")
        file.write_text(json.dumps(spec | {"experts": experts}, indent=1) + "\n")
        yield "theirs", [__file__, "--loop", str(file)], {"tokens": tokens, "experts": experts}


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds and GB of the answer of either side, or the reason why there are none."""
    if result.get("out_of_memory"):
        return {"failed": "out of memory"}
    if "ranks" not in result:
        return result
    measured = result["ranks"][0]["measured"]
    return {"ms": measured["seconds"] * 1e3, "gb": measured.get("allocated", 0) / 1e9, "device": result["device"]}


def loop(spec: dict[str, Any]) -> dict[str, Any]:
    """Take steps of a plain loop. Return milliseconds, GB and losses, or the reason why there are none."""
    sys.path += filter(None, [os.environ.get("PEERS_SITE")])
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model, known = adapted(spec, device)
    except torch.OutOfMemoryError:
        return {"failed": "out of memory: the weights"}
    remark = [known]
    for micro, recompute in attempts(spec):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            result = measure(model, spec, micro, device)
        except torch.OutOfMemoryError:
            model.zero_grad(set_to_none=True)
        else:
            remark += [f"micro batch {micro}"] * (micro != spec["micro_batch"])
            remark += ["recomputed, unlike ours"] * (recompute and not spec["recompute"])
            return result | {"remark": "; ".join(remark)}
        gc.collect()
        torch.cuda.empty_cache()
    return {"failed": "; ".join(["out of memory at micro batch 1", *remark])}


def attempts(spec: dict[str, Any]) -> Iterator[tuple[int, bool]]:
    """Micro batches, and whether layers are recomputed, from the fastest to what needs the least memory."""
    micro = spec["micro_batch"]
    halves = [micro >> times for times in range(micro.bit_length())]
    yield from ((half, spec["recompute"]) for half in halves if spec["rows"] % half == 0)
    if not spec["recompute"]:
        yield 1, True


def adapted(spec: dict[str, Any], device: str) -> tuple[Any, str]:
    """Return the model with adapters, and a remark on its kernels and adapters."""
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**spec["config"])
    liger = device == "cuda" and with_liger(config.model_type)
    with torch.device(device):
        dtype = getattr(torch, spec["dtype"])
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    head, refused = model.get_output_embeddings(), MAMBA_REFUSES if config.model_type == "nemotron_h" else None
    linear = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part is not head]
    fused = [name for name, weight in model.named_parameters() if ".experts." in name and weight.dim() == 3]
    lora = peft.LoraConfig(
        r=spec["rank"],
        lora_alpha=spec["alpha"],
        target_modules=[name for name in linear if name.rsplit(".", 1)[-1] != refused],
        target_parameters=fused if spec["experts"] else None,
    )
    absent = [name for name in KERNELS if getattr(sys.modules[type(model).__module__], name, True) is None]
    implementation = model.config._experts_implementation
    remark = ["Liger" if liger else "no Liger", *(f"{name}: torch" for name in absent)]
    remark += [f"experts: {implementation}"] * bool(fused and implementation != "grouped_mm")
    remark += [f"no adapters of {refused}"] * bool(refused)
    remark += ["no adapters of experts"] * bool(fused and not spec["experts"])
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False).train(), "; ".join(remark)


def with_liger(model_type: str) -> bool:
    """Replace classes of transformers by Liger's, if it is there and has some for the model."""
    if importlib.util.find_spec("liger_kernel") is None:
        return False
    known = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    if replace := known.get(model_type):
        replace(**({"swiglu": False} if "moe" in model_type else {}))
    return replace is not None


def measure(model: Any, spec: dict[str, Any], micro: int, device: str) -> dict[str, Any]:
    """Take steps of this micro batch."""
    import torch

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    vocab, parts = model.config.vocab_size, spec["rows"] // micro
    ids = torch.randint(vocab, (parts, micro, spec["length"]), device=device)
    seconds, losses = [], []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    while len(seconds) < spec["steps"] and (len(seconds) <= WARM or sum(seconds) < LONG):
        began = time.perf_counter()
        total = torch.zeros((), device=device)
        for part in ids:
            loss = model(input_ids=part, labels=part, use_cache=False).loss / parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total.item())  # waits for the device
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    allocated = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    found = {"ms": statistics.median(seconds[WARM:]) * 1e3, "gb": allocated / 1e9, "micro_batch": micro}
    return found | {"all_seconds": seconds, "losses": losses}


def table(rows: list[dict[str, Any]]) -> str:
    heads = [f"{side + ' ms':>9} {'tokens/s':>9} {'GB':>5}" for side in ("ours", "theirs")]
    text = [f"{'':32} {'   '.join(heads)}  ratio  remark"]
    for row in rows:
        ours = row.get("ours", {"failed": "not run"})
        for its in row["theirs"] or [{"failed": "not run"}]:
            ratio = f"{its['ms'] / ours['ms']:5.2f}" if "ms" in its and "ms" in ours else " " * 5
            sides = {"ours": ours, "theirs": its}.items()
            notes = [f"{side}: {result['failed']}" for side, result in sides if "failed" in result]
            notes += filter(None, (its.get("remark"), ours.get("remark")))
            text.append(f"{row['name']:32} {cells(ours)}   {cells(its)}  {ratio}  {'; '.join(notes)}")
    return "\n".join(text) + "\n"


def cells(result: dict[str, Any]) -> str:
    if "ms" not in result:
        return f"{'-':>9} {'-':>9} {'-':>5}"
    return f"{result['ms']:9.0f} {result['tokens'] / result['ms'] * 1e3:9.0f} {result['gb']:5.1f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="of the results (default $OUT or runs/gpu)")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows by a part of the name: gemma, full")
    parser.add_argument("--minutes", type=float, default=9.5, metavar="M", help="end after that (9.5)")
    parser.add_argument("--list", action="store_true", help="print what would run; needs no GPU")
    parser.add_argument("--loop", type=Path, metavar="SPEC", help="take steps of their side alone, as in OUT/ROW.json")
    options = parser.parse_args()
    options.out = (options.out or Path(os.environ.get("OUT", "runs/gpu"))).absolute()
    return options


if __name__ == "__main__":
    sys.exit(main())
