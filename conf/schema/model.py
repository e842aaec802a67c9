"""Section `model` of a run's YAML: a released model, or the config.json that weights are drawn for."""

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
    """A model whose weights are drawn, as its family begins a training: in place of a released one."""

    config: Place | dict[str, Any]  # a config.json, where one lies, or its keys

    def __str__(self) -> str:
        described = self.config if isinstance(self.config, str) else self.config.get("model_type", "the keys given")
        return f"weights drawn for {described}"

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


CONFIG = "config.json"
_NAMED = TypeAdapter(Place)
_DRAWN = {"type": "object", "properties": {"config": {"type": ["string", "object"]}}, "required": ["config"]}


def _one_source(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Take a config.json for the weights that are to be drawn for it. Report one problem for the union."""
    if isinstance(value, str) and "\0" not in value and value.rpartition("/")[2] == CONFIG:
        value = {"config": value}
    if isinstance(value, Drawn):
        return validate(value)
    if not isinstance(value, dict):
        return _NAMED.validate_python(value)
    if value.keys() != {"config"} or not value["config"]:
        raise PydanticCustomError("source", "neither a model's name, folder or URI nor a section with the key config")
    try:
        return Drawn.model_validate(value)
    except ValidationError:
        raise PydanticCustomError("config", "its config is neither a path or a name nor the keys of one") from None


Source = Annotated[
    Place | Drawn, WrapValidator(_one_source), WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, _DRAWN]})
]


def _loaded(place: str | None) -> str | None:
    """Load the family, so that every process that reads the run knows it."""
    if place is not None:
        try:
            families.add(place)
        except ValueError as error:
            raise PydanticCustomError("family", "{problem}", {"problem": str(error)}) from None
    return place


class Model(Section):
    """The model that the run starts from: a released one, or one with drawn weights."""

    source: Annotated[Source, bears(derived="download")] = Field(
        description="Hugging Face Hub id, folder, s3:// URI, or tiny://KIND, which trainer.tiny makes; or {config: C} "
        "for weights drawn from train.seed: C is a config.json, a folder or Hub id with one, or its keys. So is a "
        "folder that holds a config.json and no weights"
    )
    tokenizer: Annotated[Place | None, bears(derived="download")] = Field(
        default=None,
        description="of drawn weights: Hub id, folder, s3:// URI or tiny://KIND; null = the one beside config.json",
    )
    revision: Annotated[Text, bears(derived="download")] = Field(
        default="main", description="branch, tag or commit on the Hub; pin a commit to repeat a run"
    )
    trust_remote_code: Annotated[bool, bears("download")] = Field(
        default=False, description="run Python code that the checkpoint brings along"
    )
    unsafe_weights: Annotated[bool, bears("download")] = Field(
        default=False, description="fetch pickled weights too: reading one can run code"
    )
    ignore_config: Annotated[tuple[Text, ...], NOWHERE] = Field(
        default=(),
        strict=False,
        description="keys of config.json that Megatron-Bridge does not read, and that do not matter to you",
    )
    adapter: Annotated[Place | None, bears(derived="train")] = Field(
        default=None,
        description="LoRA to start from, of the same rank and scale: a folder in PEFT's form, a Hub id, s3://, or "
        "models:/NAME/VERSION of MLflow's registry; null = a new one",
    )
    family: Annotated[Place | None, AfterValidator(_loaded), bears(derived="convert")] = Field(
        default=None,
        description="a model family from outside this repository: a Python file, or the import path of a module, with "
        "FAMILY; its Python code is run. Families of installed packages need no key",
    )
    mtp: Annotated[bool, bears("convert", "train")] = Field(
        default=True, description="train the multi-token-prediction layers, where the model has them"
    )
    compare: Annotated[bool, NOWHERE] = Field(
        default=True,
        description="compute the first layers by transformers too, and convert nothing that differs; false for a model "
        "that cannot be computed on this host",
    )
    mtp_loss_scale: Annotated[float, bears("train")] = Field(
        default=0.3,
        ge=0,
        le=10,
        description="weight of their loss over learned tokens; 0.3 is Bridge's value for GLM-4.5+",
    )
    # on the evaluation, as that of the base leaves what the tuned model is held to; on what is converted, where that is
    # packed as well
    base: Annotated[
        Literal["bf16", "fp8", "int4", "nvfp4", "mxfp4"],
        bears("train", "evaluate", derived="convert", absent="bf16"),
    ] = Field(
        default="bf16",
        description="how LoRA's frozen matrices lie in memory: bf16 = in train.precision, as they are; fp8 = 8 "
        "bits and a scale for 128 x 128; 4 bits: int4 = a scale for 32 of a row, nvfp4 = for 16, mxfp4 = a power "
        "of 2 for 32; they are unpacked for each product",
    )
    pack: Annotated[
        tuple[Literal["experts", "attention", "dense"], ...] | None, bears("train", derived="convert", absent=None)
    ] = Field(
        default=None,
        strict=False,
        min_length=1,
        description="which matrices have model.base's format, where the others are in train.precision: those of "
        "experts, of attention, and of dense layers, shared experts and MTP's projection; null = all",
    )
    dropout: Annotated[float | None, bears("train", absent=None)] = Field(
        default=None,
        ge=0,
        lt=1,
        description="in training, of attention's weights and of what each layer adds; null = as released, mostly none; "
        "none with dpo and in reinforce",
    )
