"""Section `export` of a run's YAML: the exported checkpoint, weights and formats."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from conf.schema.bearing import NOWHERE, bears
from conf.schema.sections import Count, Section


def _one_problem(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Report one problem for a union. Pydantic reports each alternative, under an internal name."""
    try:
        return validate(value)
    except ValidationError:
        raise PydanticCustomError("checkpoint", "not latest, best, base or the number of a step") from None


class Export(Section):
    """Formats that a trained checkpoint is exported to, for others to load."""

    checkpoint: Annotated[
        Annotated[Literal["latest", "best", "base"] | Count, WrapValidator(_one_problem)], bears("export")
    ] = "latest"
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
    quantization: Annotated[Literal["as_released"] | None, bears("export", "evaluate", absent=None)] = None
    """of the merged model of a quantised release: as_released = in the release's FP8 format, with the rounding errors
    in the export's report; null = bf16, as trained"""
    merge_onto: Annotated[Literal["released", "packed"], bears("export", absent="released")] = "released"
    """weights onto which the adapter of a packed base (model.base) is merged: released, or packed = the values of its
    codes, as in training"""
