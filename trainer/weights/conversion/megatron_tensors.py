"""Tensors of a Megatron model without memory: the contents of its checkpoint, and the released tensors of each.

The model is built on torch's meta device, uncut, with shapes but without memory. Megatron-core gives the name and
position under which each part of a parameter is stored; Megatron-Bridge gives the released tensors of a parameter, and
the conversion. This module repeats none of their code, with one exception: a parameter that consists of concatenated
rows of released tensors is read by rows, so reading a part does not cost more than the part.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import torch
from megatron.bridge.models.conversion.utils import unwrap_model
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
    """One entry of a checkpoint: a box of a stored tensor, and the position of its values in a parameter."""

    item: WriteItem
    name: str  # Megatron's name of the parameter in the whole model
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return self.item.tensor_data.chunk.sizes.numel() * self.item.tensor_data.properties.dtype.itemsize


def build(provider) -> list:
    """Build the model without memory for its parameters. Process groups must exist.

    Transformer Engine's parameters are on the meta device. The few others are on the CPU and are never touched. If all
    were on meta, torch would compute rotary embeddings with its compiler in Python, whose import takes seconds.
    """
    provider.perform_initialization, provider.init_model_with_meta_device = False, True
    with (
        mock.patch.dict(os.environ),  # Megatron stores the kind of attention there, and refuses another later
        mock.patch.object(YarnRotaryEmbedding, "_set_cos_sin_cache"),  # a table per layer, which is not stored
    ):
        chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    provider.init_model_with_meta_device = False  # as in the checkpoint's description
    return chunks


def tasks(bridge, chunks: list) -> dict:
    """Return Bridge's conversion of each parameter, by Megatron's name."""
    every_task = bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, unwrap_model(chunks))
    return {task.global_param_name: task for task in every_task if task is not None and task.param_weight is not None}


def pieces(tasks: dict, stored: list[ShardedTensor]) -> list[Piece]:
    """Return the entries of a checkpoint, each as a part of a parameter.

    Entries and parameters are matched by their (unallocated) storage.
    """
    names = {storage(task.param_weight): name for name, task in tasks.items()}
    result = []
    for tensor in stored:
        name = names.get(storage(tensor.data))
        assert name, f"{tensor.key} belongs to no parameter of the model"
        same = tensor.dtype == tasks[name].param_weight.dtype
        assert same, f"{tensor.key} is stored in a type other than its parameter's"
        result += _cut(tensor, name)
    return result


def give_shapes(chunks: list) -> dict[int, torch.Tensor]:
    """Replace each tensor without memory by one on the CPU with a single stored value.

    Bridge reads shape, type and device of parameters, and sends converted tensors to the device. Return the new
    tensors, by the id() of those that they replace.
    """
    replaced = {}
    for chunk in chunks:
        for module in chunk.modules():
            for table in (module._parameters, module._buffers):
                for name, value in table.items():
                    if value is not None and value.is_meta:
                        real = torch.zeros((), dtype=value.dtype).expand(value.shape)
                        real = torch.nn.Parameter(real, False) if table is module._parameters else real
                        table[name] = replaced[id(value)] = real
    return replaced


class Released(Mapping):
    """Released tensors by name, for Bridge. Tensors that were read stay in the cache until it is cleared."""

    def __init__(self, model: Model):
        self.model = model
        self.cache: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.model.weights:
            raise KeyError(name)
        if name not in self.cache:
            self.cache[name] = released_tensors.read(self.model, name)
        return self.cache[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.model.weights)

    def __len__(self) -> int:
        return len(self.model.weights)


class Values:
    """Values of pieces, made on request. Request pieces of one parameter one after another."""

    def __init__(self, bridge, tasks: dict, model: Model):
        self.bridge, self.tasks, self.released = bridge._model_bridge, tasks, Released(model)
        self.name, self.whole = "", None

    def of(self, piece: Piece) -> torch.Tensor:
        """Return a copy of the piece's values, in the stored type."""
        box = piece.item.tensor_data.chunk.sizes
        return self.part(piece, (0,) * len(box), box).contiguous()

    def part(self, piece: Piece, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Return a box of the piece's values, in the stored type. If the piece has plain rows, only the box is read."""
        before = len(lengths) - len(piece.shape)
        rows = slice(offsets[before], offsets[before] + lengths[before]) if piece.shape else slice(0)
        if piece.shape:
            shape, start = (rows.stop - rows.start, *piece.shape[1:]), piece.start + rows.start * piece.stride[0]
            piece = replace(piece, shape=shape, start=start)
        values = self._of(piece)
        for dim in range(1, len(piece.shape)):
            values = values.narrow(dim, offsets[before + dim], lengths[before + dim])
        return values.to(piece.item.tensor_data.properties.dtype).reshape(tuple(lengths))

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
        self.released.cache.clear()
        self.name, self.whole = "", None

    def _whole(self, task) -> torch.Tensor:
        """Return the parameter, converted by Bridge. From a stack of experts, only this parameter's expert is read."""
        if stacks_experts(task.mapping):
            number = extract_expert_number_from_param(task.mapping.megatron_param)
            source = released_tensors.read(self.released.model, task.mapping.hf_param, slice(number, number + 1))[0]
        else:
            source = self.bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, self.released)
        value = task.mapping.hf_to_megatron(source, task.megatron_module)
        parameter = task.param_weight
        assert value.shape == parameter.shape, f"{task.global_param_name}: {value.shape} is not {parameter.shape}"
        value = value.to(parameter.dtype).contiguous()
        assert not value.isnan().any(), f"{task.global_param_name}: Bridge did not fill it"
        return value

    def _rows(self, task, piece: Piece) -> torch.Tensor | None:
        """Return the piece as rows of the released tensors whose rows form the parameter; None for other parameters."""
        parts = _stack(task)
        whole, width = task.param_weight.shape, task.param_weight.shape[1:].numel()
        if not parts or not _are_rows(piece, width):
            return None
        sources = self.bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, self.released)
        sources = list(sources.values()) if isinstance(sources, dict) else [sources]
        if len(sources) != len(parts) or any(
            self.released.cache.get(n) is not t for n, t in zip(parts, sources, strict=True)
        ):
            return None  # Bridge continues with other tensors than the released ones
        length = sum(tensor.shape[0] for tensor in sources if tensor.shape[1:] == whole[1:])
        padded = piece.name.endswith(VOCABULARY) and length < whole[0]
        if any(tensor.shape[1:] != whole[1:] for tensor in sources) or (length != whole[0] and not padded):
            return None
        first = piece.start // max(1, width)
        stop, pieces, begin = first + piece.shape[0], [], 0
        for name, tensor in zip(parts, sources, strict=True):
            rows = slice(max(first - begin, 0), min(stop - begin, tensor.shape[0]))
            if rows.start < rows.stop:
                all_of_it = rows == slice(0, tensor.shape[0])
                pieces.append(tensor if all_of_it else released_tensors.read(self.released.model, name, rows))
            begin += tensor.shape[0]
        if stop > length:  # Bridge pads a vocabulary with zeros
            pieces.append(sources[0].new_zeros((stop - max(first, length), *whole[1:])))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _stack(task) -> list[str]:
    """Return the released tensors whose concatenated rows are the parameter's, if the mapping is known to do that."""
    mapping = task.mapping
    if type(mapping) in PLAIN and getattr(mapping, "permute_dims", None) is None:
        return [mapping.hf_param]
    if isinstance(mapping.hf_param, dict) and list(mapping.hf_param) == ["gate", "up"]:
        return list(mapping.hf_param.values())
    return []


def _are_rows(piece: Piece, width: int) -> bool:
    contiguous = torch.empty(piece.shape, device="meta").stride() == piece.stride
    return bool(piece.shape) and contiguous and piece.shape[1:] != () and piece.start % max(1, width) == 0


def storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, allocated or not."""
    return tensor.untyped_storage()._cdata


def _cut(tensor: ShardedTensor, name: str) -> Iterator[Piece]:
    """Yield the tensor whole or, if large, by rows, like a cut for tensor parallelism."""
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
