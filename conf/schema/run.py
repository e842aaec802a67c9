"""Schema of a run's YAML: its sections, which conf/schema/sections.py defines.

    python -m conf.schema            a table of all keys
    python -m conf.schema --json     the JSON schema, which editors use to complete and check conf/*.yaml

Rules between keys are in conf/rules/contradictions.py and conf/rules/layout.py. conf/load.py reads the files.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from conf.schema.bearing import bears
from conf.schema.clusters import Kubernetes, Slurm
from conf.schema.data import Data
from conf.schema.export import Convert, Export
from conf.schema.model import Model
from conf.schema.reinforcement import Reinforce
from conf.schema.sections import (
    Adapter,
    Checkpoint,
    Evaluate,
    Gang,
    Hardware,
    Layout,
    Log,
    Paths,
    Promote,
    Section,
    Track,
    is_section,
)
from conf.schema.training import Moe, Optimizer, Train


def spelled_out(layout: Any) -> Any:
    """Replace the short form `layout: auto` by a section."""
    return {"auto": True} if layout == "auto" else layout


class Run(Section):
    """One fine-tuning run."""

    name: Annotated[str, bears(derived="promote")] = Field(pattern=r"^[a-z0-9-]+$", max_length=100)
    """name of the run and of its folder"""
    model: Model
    data: Data
    convert: Convert = Field(default_factory=Convert)
    adapter: Adapter = Field(default_factory=Adapter)
    layout: Annotated[Layout, BeforeValidator(spelled_out, json_schema_input_type=Layout | Literal["auto"])] = Field(
        default_factory=Layout
    )
    hardware: Hardware = Field(default_factory=Hardware)
    train: Train
    optimizer: Optimizer
    moe: Moe = Field(default_factory=Moe)
    checkpoint: Checkpoint
    reinforce: Reinforce = Field(default_factory=Reinforce)
    log: Log = Field(default_factory=Log)
    export: Export = Field(default_factory=Export)
    evaluate: Evaluate = Field(default_factory=Evaluate)
    gang: Gang = Field(default_factory=Gang)
    slurm: Slurm = Field(default_factory=Slurm)
    kubernetes: Kubernetes = Field(default_factory=Kubernetes)
    promote: Promote = Field(default_factory=Promote, validate_default=True)
    track: Track = Field(default_factory=Track)
    paths: Paths = Field(default_factory=Paths, validate_default=True)

    @field_validator("promote")
    @classmethod
    def promotion_knows_the_name(cls, promote: Promote, info: ValidationInfo) -> Promote:
        return promote.model_copy(update={"model": promote.model.replace("{name}", info.data.get("name", "{name}"))})

    @field_validator("paths")
    @classmethod
    def paths_know_the_name(cls, paths: Paths, info: ValidationInfo) -> Paths:
        name = info.data.get("name", "{name}")  # absent if it is invalid
        return Paths(**{key: value.replace("{name}", name) for key, value in paths})

    def changed(self, **sections: Mapping[str, Any]) -> "Run":
        """The run with other values of keys, by section. They are not validated again."""
        changes = {name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        return self.model_copy(update=changes)

    @property
    def world(self) -> int:
        return self.layout.world


def sections() -> dict[str, type[Section]]:
    fields = ((name, field.annotation) for name, field in Run.model_fields.items())
    return {name: kind for name, kind in fields if is_section(kind)}


def dotted_keys() -> list[str]:
    """All dotted keys of values."""
    return ["name"] + [f"{section}.{key}" for section, kind in sections().items() for key in kind.model_fields]
