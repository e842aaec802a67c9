"""Declaration of whether a key counts for the identity of artifacts, next to its type, for conf/schema/identity.py.

    lr: Annotated[float, bears("train")]                       another value makes another artifact of this stage
    fp8: Annotated[str | None, bears("train", absent=None)]    a later key: older artifacts were made as with null
    revision: Annotated[Text, bears(derived="download")]       this stage derives the identity from the value
    stop_after: Annotated[Count, bears("train", held=False)]   changes no step: a resume may change it
    pool: Annotated[Text, NOWHERE]                             changes where or how something runs, not the result

A key at its `absent` value is omitted from the identity, so artifacts from before the key are still found. The value is
a literal: a change of the default does not change the identity of older artifacts.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic.fields import FieldInfo

# The stages of tasks/stages/; "source" is the stage prepare's identity of each source of data.
Stage = Literal[
    "download",
    "prepare",
    "source",
    "convert",
    "pack",
    "reference",
    "train",
    "reinforce",
    "export",
    "evaluate",
    "promote",
]
ALWAYS = object()  # equal to no value: a key that is in every identity


@dataclass(frozen=True)
class Bearing:
    """Declaration of the stages whose artifacts a key identifies."""

    stages: frozenset[Stage]  # for which the value itself counts
    derived: Stage | None  # a stage whose code derives the identity from the value
    absent: Any  # as a JSON value
    held: bool  # whether a training resumes from a checkpoint only with the same value

    @property
    def pinned(self) -> bool:
        return self.absent is not ALWAYS


def bears(*stages: Stage, derived: Stage | None = None, absent: Any = ALWAYS, held: bool | None = None) -> Bearing:
    """The declaration of a key. By default, keys of the stage train are held."""
    return Bearing(frozenset(stages), derived, absent, "train" in stages if held is None else held)


NOWHERE = bears()


def of(field: FieldInfo) -> Bearing:
    """Declaration of a section's field. conf/schema/sections.py refuses a field without one."""
    (bearing,) = (entry for entry in field.metadata if isinstance(entry, Bearing))
    return bearing


def is_declared(field: FieldInfo) -> bool:
    return any(isinstance(entry, Bearing) for entry in field.metadata)
