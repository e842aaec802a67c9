"""Whether a key bears identity: declared beside its type, and read by conf/schema/identity.py.

    lr: Annotated[float, bears("train")]                       another value makes another artifact of this stage
    fp8: Annotated[str | None, bears("train", absent=None)]    came after artifacts, which were made as with null
    revision: Annotated[Text, bears(derived="download")]       counts by what this stage finds out from it
    stop_after: Annotated[Count, bears("train", held=False)]   bears on no step: a resume may change it
    pool: Annotated[Text, NOWHERE]                             says where or how something runs, not what comes out

A key at its `absent` value is left out of the identity, so that what was made before the key came is found again. The
value is a literal: what was made without the key stays what it is when the default changes.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic.fields import FieldInfo

# The stages of tasks/stages/; and source, which is what the stage prepare takes of each source of data.
Stage = Literal[
    "download", "prepare", "source", "convert", "reference", "train", "reinforce", "export", "evaluate", "promote"
]
ALWAYS = object()  # equal to no value: a key that is in every identity


@dataclass(frozen=True)
class Bearing:
    """Declaration of what a key bears on."""

    stages: frozenset[Stage]  # the value itself counts
    derived: Stage | None  # a stage whose code derives what counts from the value
    absent: Any  # as JSON has it
    held: bool  # whether a training goes on from a checkpoint only with the value that it was saved with

    @property
    def pinned(self) -> bool:
        return self.absent is not ALWAYS


def bears(*stages: Stage, derived: Stage | None = None, absent: Any = ALWAYS, held: bool | None = None) -> Bearing:
    """The declaration of a key. What bears on the training is held, if nothing else is said."""
    return Bearing(frozenset(stages), derived, absent, "train" in stages if held is None else held)


NOWHERE = bears()


def of(field: FieldInfo) -> Bearing:
    """Declaration of a section's field. conf/schema/sections.py refuses a field without one."""
    (found,) = (one for one in field.metadata if isinstance(one, Bearing))
    return found


def is_declared(field: FieldInfo) -> bool:
    return any(isinstance(one, Bearing) for one in field.metadata)
