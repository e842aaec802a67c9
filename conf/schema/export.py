"""Sections `convert` and `export` of a run's YAML: the model's form for training, and for others."""

from typing import Annotated, Literal

from pydantic import Field

from conf.schema.bearing import NOWHERE, bears
from conf.schema.sections import Count, Section, one_problem


class Convert(Section):
    """The base: the model in the form in which training loads it."""

    to: Annotated[Literal["torch_dist", "none", "packed"], bears("convert", absent="torch_dist")] = "torch_dist"
    """torch_dist = a copy in Megatron's format; none = no copy: training reads the released files, with bitwise equal
    losses; packed = the codes and scales of model.base, which training reads directly. The plan compares the costs"""
    hosts: Annotated[Literal["one", "all"], NOWHERE] = "one"
    """one = the flow's host converts; all = each host of training converts a part of the tensors"""


_ONE_CHECKPOINT = one_problem("checkpoint", "not latest, best, base or the number of a step")


class Export(Section):
    """Formats that a trained checkpoint is exported to, for others to load."""

    checkpoint: Annotated[Annotated[Literal["latest", "best", "base"] | Count, _ONE_CHECKPOINT], bears("export")] = (
        "latest"
    )
    """checkpoint to export: the newest, the best by validation (checkpoint.keep_best), the untrained base, or a step
    that checkpoint.save_every saves"""
    every: Annotated[Count | None, NOWHERE] = None
    """write the adapter in PEFT's format into the folder adapter of every n-th checkpoint; null = never"""
    weights: Annotated[Literal["trained", "ema"], bears("export", absent="trained")] = "trained"
    """weights of the checkpoint, or their moving mean (train.ema_decay)"""
    formats: Annotated[tuple[Literal["merged", "adapter"], ...] | None, bears("export")] = Field(
        default=None, strict=False
    )
    """merged = whole model; adapter = PEFT's format; null = all that apply"""
    quantization: Annotated[
        Literal["as_released", "fp8", "int4", "nvfp4", "mxfp4", "packed"] | None,
        bears("export", "evaluate", absent=None),
    ] = None
    """as_released = the merged model of a quantised release in its FP8 format; fp8, int4, nvfp4, mxfp4 = the merged
    model of any release, rounded to codes of 8 or 4 bits; the export's report has the rounding errors; packed = the
    untrained model (checkpoint: base) as the codes of model.base, for vLLM; null = bf16, as trained"""
    max_loss: Annotated[Annotated[float, Field(gt=0)] | None, bears("evaluate", absent=None)] = None
    """nats per token by which held-out answers may become less likely than in training, through quantization;
    evaluate-tuned fails above it; null = any"""
    gguf: Annotated[Literal["f32", "bf16", "f16", "q8_0"] | None, bears("export", absent=None)] = None
    """type of the numbers in a GGUF file for llama.cpp, which is written next to the merged model; null = none"""
    merge_onto: Annotated[Literal["released", "packed"], bears("export", absent="released")] = "released"
    """weights onto which the adapter of a packed base (model.base) is merged: released, or packed = the values of its
    codes, as in training"""
