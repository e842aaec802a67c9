"""Implementation of trainer/convert.py: write a converted model that is never in memory as a whole."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from megatron.bridge.models.hf_pretrained.state import StateDict
from megatron.bridge.training import checkpointing
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer, LoggerConfig
from megatron.bridge.training.state import GlobalState
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import get_model_config

from conf.schema.run import Run
from conf.schema.sections import Layout
from trainer.megatron.model import make_provider
from trainer.weights import atomic_folder, coverage, journal, model_digests, released
from trainer.weights.conversion import megatron_tensors, shards
from trainer.weights.mapping import released_names

_CHECKPOINT = CheckpointConfig(
    async_save=False, save_optim=False, save_rng=False, ckpt_format="torch_dist", dist_ckpt_optim_fully_reshardable=True
)


class Conversion:
    """A release and the Megatron model to fill from it, with all facts that are known before a weight is read."""

    work: shards.Work  # since writing began

    def __init__(self, run: Run, bridge, model: released.Model, known: dict[str, str] | None):
        self.model, self.bridge, self.known = model, bridge, known  # checksums of the tensors, or None
        if model.packed:  # give Bridge the names of weights; the release stores codes under other names
            bridge.hf_pretrained._state_dict_accessor = StateDict(dict.fromkeys(model.weights))
        self.chunks = megatron_tensors.build(_provider(run, bridge))
        left_out = released.copied(model) | (set() if run.model.mtp else {*released.of_mtp(model)})
        coverage.check(bridge, self.chunks, model, known or _sums_of_copies(model), left_out)
        self.left_out = sorted(left_out)
        tasks = self.tasks = megatron_tensors.tasks(bridge, self.chunks)
        self.state = _state(self.chunks)
        stored = [value for value in nested_values(self.state) if isinstance(value, ShardedTensor)]
        self.stored = {(tensor.key, tensor.global_offset) for tensor in stored}
        self.pieces = megatron_tensors.pieces(tasks, stored)

    @cached_property
    def shards(self) -> list[shards.Shard]:
        sources = {name: _released_tensors(task, self.model) for name, task in self.tasks.items()}
        return shards.cut(self.pieces, sources, self.model)

    def values(self) -> megatron_tensors.Values:
        real = megatron_tensors.give_shapes(self.chunks)
        tasks = {
            name: replace(task, param_weight=real.get(id(task.param_weight), task.param_weight))
            for name, task in self.tasks.items()
        }
        return megatron_tensors.Values(self.bridge, tasks, self.model)

    def write(self, partial: Path, noted: Path, weights: bool) -> dict[str, str]:
        """Write the checkpoint over all ranks. Without `weights`, write everything except the weights.

        Return the checksums of all released tensors. work.wait() waits for the disk.
        """
        sums: dict[str, str] = {}

        def write(state: dict, folder: Path) -> None:
            stored = [*nested_values(state)]
            objects = [value for value in stored if isinstance(value, ShardedObject)]
            keys = {(value.key, value.global_offset) for value in stored if isinstance(value, ShardedTensor)}
            assert keys == self.stored, "Megatron-Bridge saves other tensors than the model has"
            work = self.work = shards.Work(folder, self.shards, objects, self.values() if weights else None)
            entries = journal.do(
                noted,
                {shard.number: self._size(shard.pieces, shard.tensors) for shard in self.shards},
                work.is_whole,
                make=lambda number: work.make(number, self.model, self.known),
                ahead=lambda number: released.read_ahead(self.model, self.shards[number].tensors),
            )
            sums.update({name: checksum for entry in entries.values() for name, checksum in entry["sums"].items()})
            if atomic_folder.rank() == 0:
                work.finish(entries)

        _save(self.chunks, self.state, partial, write)
        return sums

    def _size(self, pieces: tuple[megatron_tensors.Piece, ...], tensors: tuple[str, ...]) -> int:
        return sum(piece.size for piece in pieces) + sum(self.model.tensors[name].size for name in tensors)


def _provider(run: Run, bridge):
    """Return the provider of the run's model in one piece, with a vocabulary padded for the run's layout."""
    whole = run.model_copy(update={"layout": Layout(gpus_per_node=run.world)})
    provider = make_provider(whole, bridge)
    provider.make_vocab_size_divisible_by *= run.layout.tp
    provider.finalize()
    if not parallel_state.model_parallel_is_initialized():
        provider.initialize_model_parallel(seed=run.train.seed)
    return provider


def _sums_of_copies(model: released.Model) -> dict[str, str]:
    names = {name for pair in released.repeated(model).items() for name in pair if name in model.weights}
    return released.checksums(model, {part for name in names for part in model.parts(name)})[0]


def _released_tensors(task, model: released.Model) -> list[str]:
    """Return the released tensors from which the parameter is made, including scales."""
    return [part for name in released_names(task.mapping) for part in model.parts(name)]


def _state(chunks: list) -> dict:
    """Return the state that Megatron-Bridge would save. This takes seconds for layers with many experts."""
    options = {"metadata": model_digests.metadata()}
    state = checkpointing.generate_state_dict(
        _CHECKPOINT, chunks, None, None, None, iteration=0, model_sd_kwargs=options
    )
    apply_factories(state)
    return state


def _save(chunks: list, saved: dict, folder: Path, write) -> None:
    """Save like Megatron-Bridge's save_megatron_model(), which takes no strategy."""
    state = GlobalState()
    state.cfg = ConfigContainer(
        model=get_model_config(chunks[0]),
        train=None,
        optimizer=OptimizerConfig(use_distributed_optimizer=False),
        ddp=None,
        scheduler=None,
        dataset=None,
        logger=LoggerConfig(),
        tokenizer=None,
        checkpoint=replace(_CHECKPOINT, save=str(folder)),
        dist=None,
    )
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    strategy.save = lambda sharded, place: write(sharded, Path(place))  # another writer of tensors
    context = {"save_strategy": strategy}
    checkpointing.save_checkpoint(
        state, chunks, None, None, 0, checkpointing_context=context, prebuilt_state_dict=saved
    )


def record(model: released.Model, sums: dict[str, str], folder: Path) -> None:
    """Record the type, shape and checksum of each released tensor."""
    rows = {name: [t.dtype, t.shape, sums[name]] for name, t in model.tensors.items()}
    (folder / released.SOURCE).write_text(json.dumps(rows))
