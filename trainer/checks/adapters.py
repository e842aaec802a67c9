"""Check without torch of the adapter from which a training starts (model.adapter)."""

import math
from pathlib import Path

from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check(run: Run) -> None:
    """Raise a Fault if the adapter is missing, or this run's adapter cannot start from it."""
    assert run.model.adapter
    folder = Path(run.model.adapter).expanduser()
    if missing := next((name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()), None):
        of_flow = "; only python -m flows.finetune accepts a name on the Hub, s3:// and models:/"
        raise Fault(
            f"model.adapter: {folder}: no {missing}; it is a folder with PEFT's {CONFIG} and {WEIGHTS}{of_flow}"
        )
    config = json_object.read(folder / CONFIG)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("peft_type") != "LORA" or config.get("use_dora") or not isinstance(alpha, int | float):
        kind = "DoRA" if config.get("use_dora") else config.get("peft_type")
        raise Fault(f"model.adapter: {folder}: is {kind}, but only LoRA can be continued")
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise Fault(f"model.adapter: {folder}: its layers differ in rank or scale, but Megatron's all have the same")
    if rank != run.adapter.rank:
        raise Fault(f"adapter.rank: {run.adapter.rank}, but {folder} has rank {rank}; adapter.rank={rank}")
    root = math.sqrt(run.adapter.rank)
    trained = alpha / (root if config.get("use_rslora") else root**2)
    configured = run.adapter.alpha / (root if run.adapter.rslora else root**2)
    if not math.isclose(trained, configured):
        scales = f"{run.adapter.alpha} scales the adapter's output by {configured:g}, but {folder} was trained with"
        raise Fault(f"adapter.alpha: {scales} {trained:g}; {_keys(trained, root)}")


def _keys(scale: float, root: float) -> str:
    """The keys that give this scale, by the rank or by its root. An export of rsLoRA may have a fractional alpha."""
    for rooted, alpha in (("false", scale * root**2), ("true", scale * root)):
        if round(alpha) > 0 and math.isclose(alpha, round(alpha), rel_tol=1e-6):
            return f"adapter.alpha={round(alpha)} adapter.rslora={rooted}"
    return "no integer adapter.alpha gives this scale"
