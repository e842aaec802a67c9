"""The converted model, written without ever being in memory: what trainer/convert.py makes, and what can go wrong."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path

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
from trainer.weights.conversion.megatron_tensors import Values

_CHECKPOINT = CheckpointConfig(
    async_save=False,
    save_optim=False,
    save_rng=False,
    ckpt_format="torch_dist",
    dist_ckpt_optim_fully_reshardable=True,
)


class Conversion:
    """A release and the Megatron model that it is to fill, with all that is known before a weight is read."""

    def __init__(self, run: Run, bridge, model: released.Model, known: dict[str, str] | None):
        self.model, self.bridge, self.known = model, bridge, known  # the tensors' checksums, where they are known
        megatron_tensors.show_weights(bridge, model)
        self.chunks = megatron_tensors.build(_provider(run, bridge))
        self.work: shards.Work | None = None  # the writing, once it has begun
        wanted = coverage.demand(bridge, self.chunks)
        left_out = set() if run.model.mtp else released.of_mtp(model)
        coverage.check(wanted, model, known or _sums_of_copies(model), left_out)
        self.left_out = sorted(left_out)
        tasks = self.tasks = megatron_tensors.tasks(bridge, self.chunks)
        self.state = _state(self.chunks)
        stored = [value for value in nested_values(self.state) if isinstance(value, ShardedTensor)]
        self.stored = {(one.key, one.global_offset) for one in stored}
        self.pieces = megatron_tensors.pieces(tasks, stored)

    @cached_property
    def shards(self) -> list[shards.Shard]:
        made_of = {name: _released_names(task, self.model) for name, task in self.tasks.items()}
        return shards.cut(self.pieces, made_of, self.model)

    @property
    def digest(self) -> str:
        return shards.digest(self.shards)

    def values(self) -> Values:
        given = megatron_tensors.give_shapes(self.chunks)
        tasks = {
            name: replace(task, param_weight=given.get(id(task.param_weight), task.param_weight))
            for name, task in self.tasks.items()
        }
        return Values(self.bridge, tasks, self.model)

    def write(self, partial: Path, noted: Path, weights: bool) -> dict[str, str]:
        """Write the checkpoint over all ranks; without `weights`, all of it but those.

        Returns the checksums of all released tensors. settle() waits for the disk.
        """
        sums: dict[str, str] = {}

        def write(state: dict, folder: Path) -> None:
            objects = [value for value in nested_values(state) if isinstance(value, ShardedObject)]
            asked = {(one.key, one.global_offset) for one in nested_values(state) if isinstance(one, ShardedTensor)}
            assert asked == self.stored, "Megatron-Bridge saves other tensors than the model says it has"
            work = self.work = shards.Work(folder, self.shards, objects, self.values() if weights else None)
            sizes = {one.number: one.size + sum(map(self._size, one.tensors)) for one in self.shards}
            entries = journal.do(
                noted,
                sizes,
                work.is_whole,
                make=lambda number: work.make(number, self.model, self.known),
                ahead=lambda number: released.read_ahead(self.model, self.shards[number].tensors),
            )
            sums.update({name: one for entry in entries.values() for name, one in entry["sums"].items()})
            if atomic_folder.rank() == 0:
                work.finish(entries)

        _save(self.chunks, self.state, partial, write)
        return sums

    def settle(self) -> None:
        """Wait until the disk has what this rank has written."""
        if self.work:
            self.work.wait()

    def _size(self, name: str) -> int:
        return self.model.tensors[name].size


def _provider(run: Run, bridge):
    """The run's model in one piece, with a vocabulary padded as the run's layout pads it."""
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


def _released_names(task, model: released.Model) -> list[str]:
    """Names of the released tensors that the parameter is made of, with those of scales."""
    names = task.mapping.hf_param
    return [part for name in ([names] if isinstance(names, str) else names.values()) for part in model.parts(name)]


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron-core's way to save, with another writer of tensors."""

    def __init__(self, write):
        super().__init__("torch_dist", 1)
        self.write = write

    def save(self, sharded_state_dict, checkpoint_dir) -> None:
        self.write(sharded_state_dict, Path(checkpoint_dir))


def _state(chunks: list) -> dict:
    """What Megatron-Bridge would save of the model. It takes seconds where a layer has many experts."""
    asked = {"metadata": model_digests.metadata()}
    state = checkpointing.generate_state_dict(_CHECKPOINT, chunks, None, None, None, iteration=0, model_sd_kwargs=asked)
    apply_factories(state)
    return state


def _save(chunks: list, saved: dict, folder: Path, write) -> None:
    """Save as Megatron-Bridge's save_megatron_model() does, which takes no strategy."""
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
    context = {"save_strategy": _Strategy(write)}
    checkpointing.save_checkpoint(
        state, chunks, None, None, 0, checkpointing_context=context, prebuilt_state_dict=saved
    )


def record(model: released.Model, sums: dict[str, str], folder: Path) -> None:
    """Write down what each released tensor was."""
    rows = {name: [t.dtype, t.shape, sums[name]] for name, t in model.tensors.items()}
    (folder / released.SOURCE).write_text(json.dumps(rows))
