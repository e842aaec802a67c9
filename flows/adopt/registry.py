"""All stacks by name."""

from flows.adopt.stack import Stack
from flows.adopt.stacks.axolotl import AXOLOTL
from flows.adopt.stacks.documents import DOCUMENTS
from flows.adopt.stacks.ms_swift import MS_SWIFT

STACKS: dict[str, Stack] = {stack.name: stack for stack in (AXOLOTL, MS_SWIFT, *DOCUMENTS)}
