"""Tensors of a Megatron model that is not there: what a checkpoint of it holds, and which released tensors make it up.

The model is built on torch's meta device, uncut, where it has shapes and no memory. Megatron-core says under which
name, and where in it, each part of a parameter is stored; Megatron-Bridge says which released tensors a parameter is
made of, and how. Both are asked, and nothing is written down here a second time, with one exception: a parameter whose
rows are those of released tensors, one after another, is read by rows, so a part of it costs no more than the part.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import torch
from megatron.bridge.models.conversion.utils import unwrap_model
from megatron.bridge.models.hf_pretrained.state import StateDict
from megatron.bridge.utils.common_utils import extract_expert_number_from_param
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from trainer.weights import released_tensors
from trainer.weights.coverage import VOCABULARY
from trainer.weights.mapping import PLAIN, stacks_experts
from trainer.weights.released import Model

AT_ONCE = 2**28  # bytes of a tensor of plain rows that are stored as one piece


@dataclass(frozen=True)
class Piece:
    """One entry of a checkpoint: a box of a stored tensor, and where its values lie in a parameter."""

    item: WriteItem
    name: str  # of the parameter, as Megatron has it in the whole model
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return self.item.tensor_data.chunk.sizes.numel() * self.item.tensor_data.properties.dtype.itemsize


def build(provider) -> list:
    """Build the model without memory for its parameters. The process groups are there.

    Transformer Engine's are on meta, and the few others on the CPU, where nothing touches them. All on meta would have
    torch compute rotary embeddings in Python, with its compiler, whose import takes seconds.
    """
    provider.perform_initialization, provider.init_model_with_meta_device = False, True
    with (
        mock.patch.dict(os.environ),  # Megatron notes the kind of attention there, and refuses another in this process
        mock.patch.object(YarnRotaryEmbedding, "_set_cos_sin_cache"),  # a table for each layer; none is stored
    ):
        chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    provider.init_model_with_meta_device = False  # of the checkpoint's own description
    return chunks


def show_weights(bridge, model: Model) -> None:
    """Show Bridge the names of weights, where the release has codes by others: it leaves out what is not there."""
    if model.packed:
        bridge.hf_pretrained._state_dict_accessor = StateDict(dict.fromkeys(model.weights))


def tasks(bridge, chunks: list) -> dict:
    """Bridge's conversion of each parameter, by Megatron's name."""
    found = bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, unwrap_model(chunks))
    return {task.global_param_name: task for task in found if task is not None and task.param_weight is not None}


def pieces(tasks: dict, stored: list[ShardedTensor]) -> list[Piece]:
    """Entries of a checkpoint, each as a part of a parameter: they share memory, which neither has."""
    names = {_storage(task.param_weight): name for name, task in tasks.items()}
    found = []
    for tensor in stored:
        name = names.get(_storage(tensor.data))
        assert name, f"{tensor.key} is made of no parameter of the model"
        assert tensor.dtype == tasks[name].param_weight.dtype, f"{tensor.key} is stored in another type than it has"
        found += _cut(tensor, name)
    return found


def give_shapes(chunks: list) -> dict[int, torch.Tensor]:
    """Put a tensor on the CPU, of one number that counts as all of them, in the place of each that is nowhere.

    Bridge asks parameters for shape, type and device, and sends what it makes of released tensors to the device.
    Returns the new ones, by the id() of those that they stand for.
    """
    given = {}
    for chunk in chunks:
        for module in chunk.modules():
            for table in (module._parameters, module._buffers):
                for name, value in table.items():
                    if value is not None and value.is_meta:
                        real = torch.zeros((), dtype=value.dtype).expand(value.shape)
                        real = torch.nn.Parameter(real, False) if table is module._parameters else real
                        table[name] = given[id(value)] = real
    return given


class Released(Mapping):
    """Released tensors by name, as Bridge asks for them. Those that it was given are kept until forget()."""

    def __init__(self, model: Model):
        self.model = model
        self.given: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.model.weights:
            raise KeyError(name)
        if name not in self.given:
            self.given[name] = released_tensors.read(self.model, name)
        return self.given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.model.weights)

    def __len__(self) -> int:
        return len(self.model.weights)

    def forget(self) -> None:
        self.given.clear()


class Values:
    """Values of pieces, made when they are asked for. Pieces of one parameter are best asked for one after another."""

    def __init__(self, bridge, tasks: dict, model: Model):
        self.bridge, self.tasks, self.released = bridge._model_bridge, tasks, Released(model)
        self.name, self.whole = "", None

    def of(self, piece: Piece) -> torch.Tensor:
        """The piece's values, in memory of their own, as they are to be stored."""
        box, dtype = piece.item.tensor_data.chunk.sizes, piece.item.tensor_data.properties.dtype
        return self._of(piece).to(dtype).reshape(box).contiguous()

    def part(self, piece: Piece, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """A box of the piece's values, as they would be stored. Of plain rows nothing but the box is read."""
        before = len(lengths) - len(piece.shape)
        rows = slice(offsets[before], offsets[before] + lengths[before]) if piece.shape else slice(0)
        if piece.shape:
            shape, start = (rows.stop - rows.start, *piece.shape[1:]), piece.start + rows.start * piece.stride[0]
            piece = replace(piece, shape=shape, start=start)
        found = self._of(piece)
        for dim in range(1, len(piece.shape)):
            found = found.narrow(dim, offsets[before + dim], lengths[before + dim])
        return found.to(piece.item.tensor_data.properties.dtype).reshape(tuple(lengths))

    def _of(self, piece: Piece) -> torch.Tensor:
        if piece.name != self.name:
            self.forget()
            self.name = piece.name
        task = self.tasks[piece.name]
        rows = self._rows(task, piece) if self.whole is None else None
        if rows is not None:
            return rows
        if self.whole is None:
            self.whole = self._whole(task)
        return self.whole.as_strided(piece.shape, piece.stride, self.whole.storage_offset() + piece.start)

    def forget(self) -> None:
        self.released.forget()
        self.name, self.whole = "", None

    def _whole(self, task) -> torch.Tensor:
        """The parameter, as Bridge makes it. Of a stack of experts, its own is all that is read, and unpacked."""
        if stacks_experts(task.mapping):
            number = extract_expert_number_from_param(task.mapping.megatron_param)
            given = released_tensors.read(self.released.model, task.mapping.hf_param, slice(number, number + 1))
        else:
            given = self.bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, self.released)
        found = task.mapping.hf_to_megatron(given, task.megatron_module)
        wanted = task.param_weight
        assert found.shape == wanted.shape, f"{task.global_param_name}: {found.shape} is not {wanted.shape}"
        found = found.to(wanted.dtype).contiguous()
        assert not found.isnan().any(), f"{task.global_param_name}: Bridge has not filled it"
        return found

    def _rows(self, task, piece: Piece) -> torch.Tensor | None:
        """The piece as rows of the released tensors that the parameter is a stack of; None if it is no such stack."""
        parts = _stack(task)
        whole, width = task.param_weight.shape, task.param_weight.shape[1:].numel()
        if not parts or not _are_rows(piece, width):
            return None
        given = self.bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, self.released)
        given = list(given.values()) if isinstance(given, dict) else [given]
        if len(given) != len(parts) or any(
            self.released.given.get(n) is not t for n, t in zip(parts, given, strict=True)
        ):
            return None  # it is not the released tensors that Bridge goes on with
        length = sum(tensor.shape[0] for tensor in given if tensor.shape[1:] == whole[1:])
        padded = piece.name.endswith(VOCABULARY) and length < whole[0]
        if any(tensor.shape[1:] != whole[1:] for tensor in given) or (length != whole[0] and not padded):
            return None
        first = piece.start // max(1, width)
        stop, found, begin = first + piece.shape[0], [], 0
        for name, tensor in zip(parts, given, strict=True):
            rows = slice(max(first - begin, 0), min(stop - begin, tensor.shape[0]))
            if rows.start < rows.stop:
                all_of_it = rows == slice(0, tensor.shape[0])
                found.append(tensor if all_of_it else released_tensors.read(self.released.model, name, rows))
            begin += tensor.shape[0]
        if stop > length:  # Bridge pads a vocabulary with zeros
            found.append(given[0].new_zeros((stop - max(first, length), *whole[1:])))
        return found[0] if len(found) == 1 else torch.cat(found)


def _stack(task) -> list[str]:
    """The released tensors whose rows, one after another, are the parameter's, where the mapping is known for that."""
    mapping = task.mapping
    if type(mapping) in PLAIN and getattr(mapping, "permute_dims", None) is None:
        return [mapping.hf_param]
    if isinstance(mapping.hf_param, dict) and list(mapping.hf_param) == ["gate", "up"]:
        return list(mapping.hf_param.values())
    return []


def _are_rows(piece: Piece, width: int) -> bool:
    contiguous = torch.empty(piece.shape, device="meta").stride() == piece.stride
    return bool(piece.shape) and contiguous and piece.shape[1:] != () and piece.start % max(1, width) == 0


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _cut(tensor: ShardedTensor, name: str) -> Iterator[Piece]:
    """The tensor as it is, or, where it is large, by rows, as tensor parallelism would cut it."""
    data, before = tensor.data, tensor.prepend_axis_num
    offset = tensor.global_offset
    count = -(-data.nbytes // AT_ONCE) if data.ndim > 1 else 1
    step = -(-data.shape[0] // count) if count > 1 else 0
    for part in data.split(step) if step else [data]:
        moved = int(part.storage_offset() - data.storage_offset()) // max(1, data.stride(0)) if step else 0
        place = [*offset[:before], offset[before] + moved, *offset[before + 1 :]] if step else list(offset)
        box = ChunkStorageMetadata(torch.Size(place), torch.Size((1,) * before + tuple(part.shape)))
        written = TensorWriteData(box, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.global_shape))
        item = WriteItem(MetadataIndex(tensor.key, box.offsets), WriteItemType.SHARD, tensor_data=written)
        yield Piece(item, name, tuple(part.shape), part.stride(), part.storage_offset())
