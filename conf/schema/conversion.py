"""Section `convert` of a run's YAML: conversion of the released weights for training."""

from typing import Annotated, Literal

from conf.schema.bearing import NOWHERE, bears
from conf.schema.sections import Section


class Convert(Section):
    """The base: the model in the form in which training loads it."""

    to: Annotated[Literal["torch_dist", "none", "packed"], bears("convert", absent="torch_dist")] = "torch_dist"
    """torch_dist = a copy in Megatron's format; none = no copy: training reads the released files, with bitwise equal
    losses; packed = the codes and scales of model.base, which training reads directly. The plan compares the costs"""
    hosts: Annotated[Literal["one", "all"], NOWHERE] = "one"
    """one = the flow's host converts; all = each host of training converts a part of the tensors"""
