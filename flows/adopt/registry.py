"""All stacks by name."""

from flows.adopt.stack import Stack
from flows.adopt.stacks.axolotl import AXOLOTL
from flows.adopt.stacks.documents import DOCUMENTS
from flows.adopt.stacks.llama_factory import LLAMA_FACTORY
from flows.adopt.stacks.megatron_bridge import MEGATRON_BRIDGE, NEMO_2
from flows.adopt.stacks.megatron_lm import MEGATRON_LM
from flows.adopt.stacks.ms_swift import MS_SWIFT
from flows.adopt.stacks.oumi import OUMI
from flows.adopt.stacks.torchtune import TORCHTUNE
from flows.adopt.stacks.trl import TRL
from flows.adopt.stacks.unsloth import UNSLOTH
from flows.adopt.stacks.verl import VERL, VERL_RL

_ALL = (
    AXOLOTL,
    MS_SWIFT,
    VERL,
    VERL_RL,
    LLAMA_FACTORY,
    TRL,
    OUMI,
    TORCHTUNE,
    UNSLOTH,
    MEGATRON_BRIDGE,
    NEMO_2,
    MEGATRON_LM,
    *DOCUMENTS,
)
STACKS: dict[str, Stack] = {stack.name: stack for stack in _ALL}
