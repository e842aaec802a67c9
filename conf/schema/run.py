"""A run's YAML: its sections, which conf/sections.py defines, and the rules between their keys.

    python -m conf.schema            a table of all keys
    python -m conf.schema --json     the JSON schema, which editors use to complete and check conf/*.yaml

contradictions() holds the rules between keys, except for those of the parallel layout: they are in conf/layout.py.
Nothing here reads a file: conf/load.py does.
"""

import argparse
import itertools
import json
import shutil
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from conf import clusters, levers
from conf.clusters import Kubernetes, Slurm
from conf.data import Data, Rows
from conf.sections import (
    Adapter,
    Checkpoint,
    Evaluate,
    Export,
    Gang,
    Hardware,
    Layout,
    Log,
    Model,
    Paths,
    Promote,
    Section,
    Track,
)
from conf.training import Moe, Optimizer, Train

LINES = ("slurm.setup",)  # lists whose entries may be equal: lines of a script


def spelled_out(layout: Any) -> Any:
    """`layout: auto` is short for a section."""
    return {"auto": True} if layout == "auto" else layout


class Run(Section):
    """One fine-tuning run."""

    name: str = Field(
        pattern=r"^[a-z0-9-]+$", max_length=100, description="names the run's folder, and the run to people"
    )
    model: Model
    data: Data
    adapter: Adapter = Field(default_factory=Adapter)
    layout: Annotated[Layout, BeforeValidator(spelled_out, json_schema_input_type=Layout | Literal["auto"])] = Field(
        default_factory=Layout
    )
    hardware: Hardware = Field(default_factory=Hardware)
    train: Train
    optimizer: Optimizer
    moe: Moe = Field(default_factory=Moe)
    checkpoint: Checkpoint
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
        name = info.data.get("name", "{name}")  # absent when it is itself wrong
        return Paths(**{key: value.replace("{name}", name) for key, value in paths})

    @property
    def world(self) -> int:
        return self.layout.world


def sections() -> dict[str, type[Section]]:
    fields = ((name, field.annotation) for name, field in Run.model_fields.items())
    return {name: kind for name, kind in fields if isinstance(kind, type) and issubclass(kind, Section)}


def dotted_keys() -> list[str]:
    """All dotted keys that hold a value."""
    return ["name"] + [f"{section}.{key}" for section, kind in sections().items() for key in kind.model_fields]


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    """Yields (key, problem) for values that are right alone and wrong together."""
    train, optimizer, moe = run.train, run.optimizer, run.moe
    yield from _repetitions(run)
    if run.adapter.kind != "none" and not run.adapter.targets:
        yield "adapter.targets", f"empty, but adapter.kind is {run.adapter.kind}"
    if "adapter" in (run.export.formats or ()) and run.adapter.kind == "none":
        yield "export.formats", "adapter, but adapter.kind is none: none is trained"
    if "adapter" in (run.export.formats or ()) and run.export.checkpoint == "base":
        yield "export.formats", "adapter, but the base has none"
    if train.stop_after is not None and train.stop_after > train.steps:
        yield "train.stop_after", f"{train.stop_after} lies behind the last step, {train.steps}"
    if run.data.validation + run.data.test >= 1:
        yield "data.test", f"{run.data.test} and data.validation {run.data.validation} leave nothing to train on"
    if run.data.mixture:
        for key in Rows.model_fields:
            if getattr(run.data, key) != Rows.model_fields[key].default:
                yield f"data.{key}", "has no effect with data.mixture: say it of its parts"
    for number, part in enumerate(run.data.mixture):
        if part.source is None:
            yield f"data.mixture[{number}].source", "missing"
    if optimizer.warmup_steps >= train.steps:
        yield "optimizer.warmup_steps", f"{optimizer.warmup_steps} leaves none of the {train.steps} steps for the decay"
    if optimizer.min_lr > optimizer.lr:
        yield "optimizer.min_lr", f"{optimizer.min_lr} is above optimizer.lr {optimizer.lr}"
    if train.recompute == "selective" and not train.recompute_modules:
        yield "train.recompute_modules", "empty, but train.recompute is selective"
    if train.recompute != "selective" and train.recompute_modules:
        yield "train.recompute_modules", f"has no effect with train.recompute {train.recompute}"
    if train.recompute != "full" and train.recompute_layers != 1:
        yield "train.recompute_layers", f"has no effect with train.recompute {train.recompute}"
    if "moe_act" in train.recompute_modules and not moe.grouped_gemm:
        yield "train.recompute_modules", "moe_act needs moe.grouped_gemm"
    if moe.balance == "none" and moe.aux_loss_coeff:
        yield "moe.aux_loss_coeff", "has no effect with moe.balance none"
    yield from levers.contradictions(run)
    yield from clusters.contradictions(run.gang.engine, run.kubernetes)


def _repetitions(run: Run) -> Iterator[tuple[str, str]]:
    """Lists name things, and nothing is meant by naming one twice."""
    for section in sections():
        for key, values in getattr(run, section):
            again = {str(value) for value in values if values.count(value) > 1} if isinstance(values, tuple) else set()
            if again and f"{section}.{key}" not in LINES:
                yield f"{section}.{key}", f"{sorted(again)[0]} stands in it twice"


def json_schema() -> str:
    return json.dumps(Run.model_json_schema(), indent=2) + "\n"


def table(width: int) -> Iterator[str]:
    """Lines of the documented schema, folded to `width` where that leaves room for the meaning."""
    rows = [("KEY", "TYPE", "DEFAULT", "CHOICES OR LIMITS", "MEANING")]
    rows.append(_row("name", Run.model_json_schema()["properties"]["name"]))
    for section, kind in sections().items():
        rows += [_row(f"{section}.{key}", field) for key, field in kind.model_json_schema()["properties"].items()]
    widths = [min(32, max(len(row[column]) for row in rows)) for column in range(4)]
    widths.append(max(40, width - sum(widths) - 2 * len(widths)))
    for row in rows:
        cells = [textwrap.wrap(text, size) for text, size in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            yield "  ".join(text.ljust(size) for text, size in zip(line, widths, strict=True)).rstrip()


def _row(key: str, field: dict[str, Any]) -> tuple[str, str, str, str, str]:
    alternatives = field.get("anyOf", [field])
    kind = " or ".join(alternative["type"] for alternative in alternatives)
    value = alternatives[0].get("items", alternatives[0])
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "pattern": "matches"}
    limits = value.get("enum") or [f"{sign} {value[limit]}" for limit, sign in signs.items() if limit in value]
    default = json.dumps(field["default"]) if "default" in field else "(required)"
    return key, kind, default, ", ".join(limits), field["description"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m conf.schema", description="Print the keys of a run's YAML.")
    parser.add_argument("--json", action="store_true", help="print the JSON schema instead of a table")
    if parser.parse_args().json:
        print(json_schema(), end="")
    else:
        print("\n".join(table(shutil.get_terminal_size((160, 50)).columns)))


if __name__ == "__main__":
    main()
