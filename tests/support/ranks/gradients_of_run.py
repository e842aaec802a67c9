"""Train a few steps at some layout and compare every gradient of the first, and all losses, with one process's.

Megatron-Bridge's own loop, with the run's data, model and optimizer; B is drawn, as zeros hide what it multiplies. The
gradients are those that the optimizer gets: finished, summed over ranks, before clipping. They are told apart and put
together as a checkpoint's tensors are, by name and place, so that each rank's piece is compared, replicas too.

For test_gradients.py, which asks by request.json in paths.output, and for benchmarks/gpu/gradients.py.
"""

import contextlib
import importlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from conf.schema.run import Run
from trainer.rehearsal.tiny_models import WORDS


def make_data(folder: Path) -> None:
    """Make rows of many lengths, half of each learned, so that every part of a sequence of 128 tokens has gradients."""
    random = Random(0)
    folder.mkdir()
    for split, count in ("training", 64), ("validation", 8):
        texts = [" ".join(random.choices(WORDS, k=random.randint(3, 22))) for _ in range(2 * count)]
        rows = [{"input": one, "output": other} for one, other in zip(texts[::2], texts[1::2], strict=True)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(run: Run) -> None:
    """Train on forked ranks: rank_server.py."""
    from torch import distributed

    folder = Path(run.paths.output)
    request = json.loads((folder / "request.json").read_text())
    found = compare(run, Path(request["reference"]), request["without"], policy=request["policy"])
    if distributed.get_rank() == 0:
        (folder / "answer.json").write_text(json.dumps(found))


def start(run: Run) -> None:
    """Start the process group. Megatron leaves alone what it finds."""
    import os

    import torch

    from trainer.startup import device

    device.start()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not torch.distributed.is_initialized():
        meeting = os.environ.get("MEETING", "env://")
        rank = int(os.environ["RANK"])
        torch.distributed.init_process_group(device.backend(), meeting, rank=rank, world_size=run.world)


def compare(
    run: Run, reference: Path, without: Sequence[str] = (), exact: Path | None = None, policy: str = ""
) -> dict[str, Any]:
    """Train, and compare with `reference`; a run of one process without a reference writes it.

    `without` are names in trainer/patches that are left out. `exact` is the same of fp32, for a run in bf16. `policy`
    names a loss of reinforcement learning.
    """
    start(run)
    import torch

    losses, loads, pieces, said = train(run, without, policy)
    if not reference.exists():
        assert run.world == 1, reference
        found = {"losses": losses, "loads": loads, "tensors": dict(_whole(pieces)), "said": said}
        torch.save(found, reference.with_suffix(".partial"))
        reference.with_suffix(".partial").rename(reference)
        return {"losses": losses, "tensors": len(pieces)}
    expected = torch.load(reference)
    mine = list(_differences(pieces, expected["tensors"]))
    every: list[Any] = [None] * run.world
    torch.distributed.all_gather_object(every, (mine, {piece.key for piece in pieces}))
    missing = expected["tensors"].keys() ^ set().union(*(keys for _, keys in every))
    assert not missing, f"gradients of other tensors than one process has: {sorted(missing)[:4]}"
    rows = [row for rank, _ in every for row in rank]
    near = _nearness(pieces, expected["tensors"], exact, run.world) if exact else {}
    off = [abs(a - b) / abs(b) for a, b in zip(losses, expected["losses"], strict=True)]
    moved = [
        sum(abs(a - b) for a, b in zip(*step, strict=True)) / 2 for step in zip(loads, expected["loads"], strict=True)
    ]
    same = next((step for step, tokens in enumerate(moved) if tokens), len(moved))
    return {
        "losses": losses,
        "loss": max(off[:same], default=0.0),
        "same_routes": same,  # steps
        "moved": moved[same] if same < len(moved) else 0,  # tokens of all layers, in the first step after those
        "loss_after": max(off[same:], default=0.0),
        "compared": len(rows),
        "gradient": max(rows, key=lambda row: row["difference"]),
        "cosine": min(rows, key=lambda row: row["cosine"]),
        "whole_cosine": _whole_cosine(rows),
        "over": sorted({row["name"] for row in rows if not row["difference"] <= 1e-4}),
        "log_probs": _apart(said, expected["said"], run.world),
        **near,
    }


def _apart(said: dict[int, list[float]], expected: dict[int, list[float]], world: int) -> float:
    """Largest difference of any token's log-probability, of all ranks' answers."""
    import torch

    every: list[Any] = [None] * world
    torch.distributed.all_gather_object(every, said)
    assert {number for rank in every for number in rank} == expected.keys()
    pairs = [zip(found, expected[number], strict=True) for rank in every for number, found in rank.items()]
    return max((abs(a - b) for pair in pairs for a, b in pair), default=0.0)


def _nearness(pieces: list, single: dict[str, Any], exact: Path, world: int) -> dict[str, float]:
    """Cosines with the gradients of one process in fp32: of these ranks, and of one process in the same precision."""
    import torch

    true = torch.load(exact)["tensors"]
    every: list[Any] = [None] * world
    torch.distributed.all_gather_object(every, list(_differences(pieces, true)))
    own = sum(float(single[key].double().flatten() @ whole.double().flatten()) for key, whole in true.items())
    lengths = [math.sqrt(sum(float(whole.double().norm()) ** 2 for whole in side.values())) for side in (single, true)]
    return {
        "exact_cosine": _whole_cosine([row for rank in every for row in rank]),
        "single_cosine": own / math.prod(lengths),
    }


def train(
    run: Run, without: Sequence[str], policy: str = ""
) -> tuple[list[float], list[list[float]], list, dict[int, list[float]]]:
    """Losses of all steps and each expert's tokens, this rank's pieces of the first step's gradients, and what the
    policy says of this rank's answers before that step."""
    import torch
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.core.transformer.moe.router import TopKRouter

    from trainer.megatron import adapters
    from trainer.megatron.model import open_bridge
    from trainer.megatron.recipe import make_config
    from trainer.training.metrics import _from_last_stage

    losses: list[float] = []
    loads: list[list[float]] = []
    pieces: list = []

    class Recorder(Callback):
        def on_train_start(self, context) -> None:
            model = context.state.cfg.model
            self.table = torch.zeros(model.num_layers, model.num_moe_experts or 0, device="cuda")
            for module in (module for chunk in context.model for module in chunk.modules()):
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self.count)
            step = context.optimizer.step

            def first():
                pieces.extend(_gradients(context.model))
                context.optimizer.step = step
                return step()

            context.optimizer.step = first

        def on_train_step_end(self, context) -> None:
            last = context.loss_dict.get("lm loss", 0.0) if context.loss_dict else 0.0
            losses.extend(_from_last_stage([float(last)]))
            torch.distributed.all_reduce(self.table)
            loads.append(self.table.flatten().tolist())
            self.table.zero_()

        def count(self, router, _inputs, outputs) -> None:
            self.table[router.layer_number - 1] += outputs[1].detach().sum(0)

    adapters.SPREAD_OF_B = 1.0
    try:
        with contextlib.ExitStack() as stack:
            for name in without:
                stack.enter_context(left_out(name))
            config = make_config(run, open_bridge(run), None)
            config.checkpoint.save = None
            step, callbacks = forward_step, []
            said: dict[int, list[float]] = {}
            if policy:
                from tests.support.ranks import drawn_answers

                config.dataset, step, callbacks = drawn_answers.fed(run, policy)
                said = callbacks[0].said
            finetune(config, step, callbacks=[*callbacks[:1], Recorder(), *callbacks[1:]])
    finally:
        adapters.SPREAD_OF_B = 0.0
    return losses, loads, pieces, said


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
    """Leave a patch out while the block runs: a function of trainer/patches does nothing, a method is the original.

    `name` is such as dora.DoRALinear.forward.
    """
    module, *owners, last = name.split(".")
    owner: Any = importlib.import_module(f"trainer.patches.{module}")
    for one in owners:
        owner = getattr(owner, one)
    original = getattr(owner, last)
    if owners:
        delattr(owner, last)
    else:
        setattr(owner, last, lambda *_: None)
    try:
        yield
    finally:
        setattr(owner, last, original)


def _gradients(chunks: list) -> Iterator:
    """Descriptions by megatron-core of every trained tensor's piece on this rank, with the gradient as its data."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.utils import unwrap_model

    for chunk in chunks:
        _complete(chunk)
        weights = [(p, p.data) for p in chunk.parameters() if p.requires_grad]
        storages = {p.main_grad.untyped_storage().data_ptr() for p, _ in weights}
        for parameter, _ in weights:
            parameter.data = parameter.main_grad
        state = unwrap_model(chunk).sharded_state_dict()
        apply_factories(state)
        count = 0
        for value in nested_values(state):
            if isinstance(value, ShardedTensor) and value.data.untyped_storage().data_ptr() in storages:
                value.data = value.data.detach().float().cpu().clone()
                count += value.data.numel()
                yield value
        assert count == sum(p.numel() for p, _ in weights), "other gradients than those of the trained weights"
        for parameter, weight in weights:
            parameter.data = weight


def _complete(chunk) -> None:
    """Sum the gradients over ranks: the distributed optimizer does so only in its own part of each buffer."""
    import torch
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        if not group.ddp_config.use_distributed_optimizer:
            continue
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            own = shard_buffer(bucket.grad_data, ranks.size())[ranks.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=ranks)


def _whole(pieces: list) -> Iterator:
    """Put every tensor together from the pieces of a single process, by its key."""
    import torch

    tensors: dict[str, Any] = {}
    for piece in pieces:
        whole = tensors.setdefault(piece.key, torch.full(piece.global_shape, math.nan))
        whole[_place(piece)] = piece.data.reshape(whole[_place(piece)].shape)
    for key, whole in tensors.items():
        assert not whole.isnan().any(), f"{key}: no gradient of a part"
        yield key, whole


def _place(piece) -> tuple[slice, ...]:
    lengths = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
    return tuple(slice(at, at + length) for at, length in zip(piece.global_offset, lengths, strict=True))


def _differences(pieces: list, expected: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for piece in pieces:
        whole = expected[piece.key].double()
        should = whole[_place(piece)].flatten()
        found = piece.data.double().flatten()
        norm, own = float(should.norm()), float(found.norm())
        least = 1e-3 * float(whole.norm()) * math.sqrt(should.numel() / whole.numel())  # an expert without tokens
        layer = ".".join(map(str, piece.global_offset[: piece.prepend_axis_num]))
        product = float(should @ found)
        yield {
            "name": f"{piece.key}{'@' if layer else ''}{layer}",
            "difference": float((found - should).norm()) / max(norm, least, 1e-30),
            "cosine": product / (norm * own) if norm > least and own > 0 else float(norm <= least),
            "sums": (product, norm**2, own**2),
        }


def _whole_cosine(rows: list[dict[str, Any]]) -> float:
    """Cosine of all gradients as one vector. Replicas are added up as often as they are there."""
    product, one, other = (sum(row["sums"][i] for row in rows) for i in range(3))
    return product / math.sqrt(one * other) if other else 0.0
