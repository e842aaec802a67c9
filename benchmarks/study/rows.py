"""Layouts that a study measures: lists in conf/studies/, rows of the command line, or the planner's best layouts.

A list is YAML. Its keys are those of overrides:

    like-for-like:
      means: purpose of the list, in one line
      configuration: gpt2-large-as-documented      a name in conf/, or a file
      keys: {train.recompute: none}                of every row
      rows:
        DP2: {documented_ms: 437, keys: {layout.gpus_per_node: 2, train.global_batch: 64}}

documented_ms is an external measurement, for comparison.
"""

# pyright: reportArgumentType=false

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from conf.error_lines import key_of, line
from conf.load import FOLDER, load, replaced
from conf.planner import hardware
from conf.planner.search import changes, search
from conf.planner.verdict import facts_of
from conf.schema.run import Run
from conf.strict_yaml import parse, read_text
from contract.faults import ConfigError, Fault

STUDIES = FOLDER / "studies"
FOUND = 6  # number of layouts from the planner


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    documented_ms: float | None = None
    keys: dict[str, Any] = Field(default_factory=dict)


class _List(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    means: str
    configuration: str
    keys: dict[str, Any] = Field(default_factory=dict)
    rows: dict[str, _Row]


_LISTS = TypeAdapter(dict[str, _List])


@dataclass(frozen=True)
class Row:
    """A layout that is measured."""

    of: str  # its list
    name: str
    configuration: str
    overrides: tuple[str, ...]
    documented_ms: float | None = None

    @property
    def title(self) -> str:
        return f"{self.of}, {self.name}"

    @property
    def gpus(self) -> int:
        return self.run().world

    def run(self) -> Run:
        return load(self.configuration, self.overrides, illegal=True)

    def changed(self, overrides: Sequence[str]) -> "Row":
        """Return the row with these overrides. They replace existing overrides of the same keys."""
        return replace(self, overrides=tuple(replaced(self.overrides, overrides)))


def listed(name: str) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of a configuration's lists, and the description of each list; empty without a file."""
    file = STUDIES / f"{name}.yaml"
    if not file.is_file():
        return [], {}
    shown = str(file.relative_to(FOLDER.parent))
    data, wrong = parse(read_text(file, shown), shown)
    if wrong:
        raise ConfigError(*wrong)
    try:
        lists = _LISTS.validate_python(data)
    except ValidationError as error:
        lines = [line(one, lambda _: "") if key_of(one) else one["msg"] for one in error.errors()]
        raise ConfigError(*(f"{shown}: {text}" for text in lines)) from None
    rows = [
        Row(of, row, one.configuration, tuple(written({**one.keys, **its.keys})), its.documented_ms)
        for of, one in lists.items()
        for row, its in one.rows.items()
    ]
    return rows, {of: one.means for of, one in lists.items()}


def written(keys: dict[str, Any]) -> Iterator[str]:
    """Yield keys as overrides."""
    return (f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items())


def given(configuration: str, texts: Iterable[str]) -> list[Row]:
    """Return the rows of a command line, each "NAME: key=value key=value"."""
    rows = []
    for text in texts:
        name, mark, keys = text.partition(":")
        if not (name.strip() and mark) or any("=" not in key for key in keys.split()):
            raise Fault(f"--row: {text!r} is not a row, such as 'TP2: layout.gpus_per_node=2 layout.tp=2'")
        rows.append(Row("given", name.strip(), configuration, tuple(keys.split())))
    return rows


def found(configuration: str, overrides: Sequence[str], gpus: int) -> list[Row]:
    """Return the planner's fastest layouts on `gpus` GPUs, each with its best batch sizes."""
    run = load(configuration, overrides, illegal=True)
    gpu = hardware.of(run, gpus)
    best = {}
    for one in search(run, facts_of(run), gpu, gpus).fitting:
        best.setdefault(json.dumps(one.layout.model_dump(mode="json") | {"vpp": None}), one)
    if not best:
        raise Fault(f"--gpus: {gpus}: no layout of {configuration} is legal and fits; python -m flows.plan says why")
    rows = []
    for one in list(best.values())[:FOUND]:
        keys = (*overrides, *changes(run, one.applied(run)).split())
        rows.append(Row("planned", shape(one.applied(run)), configuration, keys))
    return rows


def shape(run: Run) -> str:
    """Return a short name of a layout, such as TP2+SP PP2 DP2."""
    layout = run.layout
    dp = layout.world // (layout.tp * layout.cp * layout.pp)
    degrees = (("TP", layout.tp), ("CP", layout.cp), ("PP", layout.pp), ("EP", layout.ep), ("DP", dp))
    parts = [f"{name}{degree}{'+SP' * (name == 'TP' and layout.sp)}" for name, degree in degrees if degree > 1]
    return " ".join(parts) or "1 GPU"
