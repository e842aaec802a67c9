"""Section `export` of a run's YAML: which of what was trained is written, and how."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from conf.schema.bearing import NOWHERE, bears
from conf.schema.sections import Count, Section


def _one_problem(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Report one problem for a union. Pydantic reports each alternative by itself, under a name that nobody wrote."""
    try:
        return validate(value)
    except ValidationError:
        raise PydanticCustomError("checkpoint", "neither latest nor best nor base nor the number of a step") from None


class Export(Section):
    """Formats that a trained checkpoint is exported to, for others to load."""

    checkpoint: Annotated[
        Annotated[Literal["latest", "best", "base"] | Count, WrapValidator(_one_problem)], bears("export")
    ] = Field(
        default="latest",
        description="which to export: the newest, the best by validation (checkpoint.keep_best), the untrained base, "
        "or a step, which checkpoint.save_every has to save",
    )
    every: Annotated[Count | None, NOWHERE] = Field(
        default=None,
        description="every so many checkpoints have their adapter in PEFT's form in their folder adapter, as "
        "soon as they are made; null = none",
    )
    weights: Annotated[Literal["trained", "ema"], bears("export", absent="trained")] = Field(
        default="trained", description="those of the checkpoint, or their moving mean (train.ema_decay)"
    )
    formats: Annotated[tuple[Literal["merged", "adapter"], ...] | None, bears("export")] = Field(
        default=None, strict=False, description="merged = the whole model; adapter = PEFT's; null = all that there is"
    )
    quantization: Annotated[Literal["as_released"] | None, bears("export", "evaluate", absent=None)] = Field(
        default=None,
        description="of the merged model of a quantised release: as_released = in the release's format, FP8, with what "
        "that loses in the export's report; null = bf16, as it was trained",
    )
    merge_onto: Annotated[Literal["released", "packed"], bears("export", absent="released")] = Field(
        default="released",
        description="what the adapter of a packed base (model.base) is merged onto: the released weights, or packed = "
        "what its codes stand for, as training had it",
    )
