"""Section `model` of a run's YAML: a released model, or a config.json for random weights."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from conf import families
from conf.schema.bearing import NOWHERE, bears
from conf.schema.sections import Place, Section, Strict, Text


class Drawn(Strict):
    """A model with random weights, as at the beginning of its family's pretraining, instead of a released one."""

    config: Place | dict[str, Any]  # the location of a config.json, or its keys

    def __str__(self) -> str:
        described = self.config if isinstance(self.config, str) else self.config.get("model_type", "the keys given")
        return f"weights drawn for {described}"

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


CONFIG = "config.json"
_NAMED = TypeAdapter(Place)
_DRAWN = {"type": "object", "properties": {"config": {"type": ["string", "object"]}}, "required": ["config"]}


def _one_source(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Convert the path of a config.json to a Drawn model. Report one problem for the union."""
    if isinstance(value, str) and "\0" not in value and value.rpartition("/")[2] == CONFIG:
        value = {"config": value}
    if isinstance(value, Drawn):
        return validate(value)
    if not isinstance(value, dict):
        return _NAMED.validate_python(value)
    if value.keys() != {"config"} or not value["config"]:
        raise PydanticCustomError("source", "not a model's name, folder or URI, or a section with the key config")
    try:
        return Drawn.model_validate(value)
    except ValidationError:
        raise PydanticCustomError("config", "its config must be a path, a name or the keys of a config.json") from None


Source = Annotated[
    Place | Drawn, WrapValidator(_one_source), WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, _DRAWN]})
]


def _loaded(place: str | None) -> str | None:
    """Load the family: every process that reads the run then knows it. The path becomes absolute."""
    if place is not None:
        place = str(Path(place).expanduser().absolute()) if place.endswith(".py") else place
        try:
            families.add(place)
        except ValueError as error:
            raise PydanticCustomError("family", "{problem}", {"problem": str(error)}) from None
    return place


class Model(Section):
    """The model that the run starts from: a released one, or one with random weights."""

    source: Annotated[Source, bears(derived="download")]
    """Hugging Face Hub id, folder, s3:// URI, or tiny://KIND, which trainer.tiny creates; or {config: C} for weights
    drawn from train.seed: C is a config.json, a folder or Hub id with one, or its keys. A folder with a config.json and
    without weights has drawn weights too. Weights are safetensors, or a checkpoint of Megatron-LM, Megatron-Bridge,
    NeMo 2 or FSDP next to config.json and tokenizer"""
    tokenizer: Annotated[Place | None, bears(derived="download")] = None
    """for drawn weights: Hub id, folder, s3:// URI or tiny://KIND; null = the one next to config.json"""
    revision: Annotated[Text, bears(derived="download")] = "main"
    """branch, tag or commit on the Hub; pin a commit to repeat a run"""
    trust_remote_code: Annotated[bool, bears("download")] = False
    """run Python code of the checkpoint"""
    unsafe_weights: Annotated[bool, bears("download")] = False
    """fetch pickled weights too: reading them can run code"""
    ignore_config: Annotated[tuple[Text, ...], NOWHERE] = Field(default=(), strict=False)
    """keys of config.json that Megatron-Bridge does not read and that this run does not need"""
    adapter: Annotated[Place | None, bears(derived="train")] = None
    """LoRA in PEFT's format to continue: a folder, a Hub id, s3://, or models:/NAME/VERSION of MLflow's registry; the
    function is the same with any alpha, and adapter.rank must have room for its A's; null = a new one"""
    merge_adapter: Annotated[Place | None, bears(derived="download", absent=None)] = None
    """LoRA or DoRA in PEFT's format to merge into the weights of source before anything else, from the same places as
    adapter: of any rank, with saved modules or trained tokens"""
    family: Annotated[Place | None, AfterValidator(_loaded), bears(derived="convert")] = None
    """a model family from outside this repository: a Python file, or the import path of a module, with FAMILY; its
    Python code is run. Families of installed packages need no key"""
    mtp: Annotated[bool, bears("convert", "train")] = True
    """train the multi-token-prediction layers, if the model has them"""
    compare: Annotated[bool, NOWHERE] = True
    """compare the first layers with transformers, and refuse a conversion that differs; false for a model that this
    host cannot compute"""
    mtp_loss_scale: Annotated[float, bears("train")] = Field(default=0.3, ge=0, le=10)
    """weight of the multi-token-prediction loss over learned tokens; 0.3 is Bridge's value for GLM-4.5+"""
    # It counts for the evaluation, as the tuned model is compared with the base's; for the conversion, if it packs too.
    base: Annotated[
        Literal["bf16", "fp8", "int4", "nvfp4", "mxfp4"], bears("train", "evaluate", derived="convert", absent="bf16")
    ] = "bf16"
    """format of LoRA's frozen matrices in memory: bf16 = unchanged, in train.precision; fp8 = 8 bits and a scale per
    128 x 128; with 4 bits: int4 = a scale per 32 of a row, nvfp4 = per 16, mxfp4 = a power of 2 per 32; they are
    unpacked for each product"""
    pack: Annotated[
        tuple[Literal["experts", "attention", "dense"], ...] | None, bears("train", derived="convert", absent=None)
    ] = Field(default=None, strict=False, min_length=1)
    """matrices with model.base's format; the others have train.precision: experts, attention, or dense = dense layers,
    shared experts and MTP's projection; null = all"""
    dropout: Annotated[float | None, bears("train", absent=None)] = Field(default=None, ge=0, lt=1)
    """dropout in training, of attention's weights and of each layer's output; null = as released, mostly none; none
    with dpo and in reinforce"""
