"""Section `convert` of a run's YAML: how the released weights get to training."""

from typing import Annotated, Literal

from pydantic import Field

from conf.schema.bearing import NOWHERE, bears
from conf.schema.sections import Section


class Convert(Section):
    """The base: the model in the form in which training loads it."""

    to: Annotated[Literal["torch_dist", "none", "packed"], bears("convert", absent="torch_dist")] = Field(
        default="torch_dist",
        description="torch_dist = a copy in Megatron's format; none = no copy: training reads the released files, with "
        "the same losses to the last bit; packed = the codes and scales of model.base, which training reads as they "
        "are. The plan says which costs less",
    )
    hosts: Annotated[Literal["one", "all"], NOWHERE] = Field(
        default="one",
        description="one = the flow's host converts; all = the hosts of training do, each a part of the tensors",
    )
