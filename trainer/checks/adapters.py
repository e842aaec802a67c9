"""The adapter that a training is to start from (model.adapter), as far as it can be checked without torch."""

import math
from pathlib import Path

from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check(run: Run) -> None:
    """Raise a Fault where the adapter is not there, or is not one that this run's goes on from."""
    assert run.model.adapter
    folder = Path(run.model.adapter).expanduser()
    if lacking := next((name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()), None):
        of_flow = "; a name on the Hub, s3:// and models:/ are for python -m flows.finetune"
        raise Fault(
            f"model.adapter: {folder}: no {lacking}; it is a folder with PEFT's {CONFIG} and {WEIGHTS}{of_flow}"
        )
    config = json_object.read(folder / CONFIG)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("peft_type") != "LORA" or config.get("use_dora") or not isinstance(alpha, int | float):
        kind = "DoRA" if config.get("use_dora") else config.get("peft_type")
        raise Fault(f"model.adapter: {folder}: is {kind}, and LoRA alone can be gone on with")
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise Fault(f"model.adapter: {folder}: has layers of unlike ranks or scales, and Megatron's have one")
    if rank != run.adapter.rank:
        raise Fault(f"adapter.rank: {run.adapter.rank}, but {folder} has rank {rank}; adapter.rank={rank}")
    root = math.sqrt(run.adapter.rank)
    theirs = alpha / (root if config.get("use_rslora") else root**2)
    ours = run.adapter.alpha / (root if run.adapter.rslora else root**2)
    if not math.isclose(theirs, ours):
        what = (
            f"{run.adapter.alpha} scales what the adapter gives by {ours:g}, and {folder} was trained with {theirs:g}"
        )
        raise Fault(f"adapter.alpha: {what}; {_keys(theirs, root)}")


def _keys(scale: float, root: float) -> str:
    """The keys that scale so, by the rank or by its root: the alpha of an export of rsLoRA is a fraction."""
    for rooted, alpha in (("false", scale * root**2), ("true", scale * root)):
        if round(alpha) > 0 and math.isclose(alpha, round(alpha), rel_tol=1e-6):
            return f"adapter.alpha={round(alpha)} adapter.rslora={rooted}"
    return "no whole adapter.alpha does"
