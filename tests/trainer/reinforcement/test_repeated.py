"""Transfers that are repeated without Megatron-Bridge and vLLM's loaders give vLLM the same policy."""

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from tests.support.reinforced import ADAPTER, answers, of_steps
from trainer.reinforcement.transfer import wire
from trainer.reinforcement.transfer.repeated import filling, recipes
from trainer.reinforcement.transfer.repeated.buckets import Buckets
from trainer.reinforcement.transfer.repeated.loading import Learned, Watch

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "model, keys",
    [
        ("glm4-moe-mtp", ("adapter.kind=lora",)),
        ("glm4-moe", ("adapter.kind=none",)),
        pytest.param("qwen3-moe", ("adapter.kind=lora", "adapter.experts=shared"), marks=pytest.mark.slow),
        pytest.param("llama", ("adapter.kind=dora",), marks=pytest.mark.slow),
    ],
)
def test_tensors_made_by_recipes_are_those_that_bridge_exports(model, keys, base, configure, ranks, work):
    base(model)
    folder = work / "-".join(["repeated", model, *keys])
    folder.mkdir()
    result = ranks("repeated_export", configure(model, *keys, f"paths.output={folder}"))
    assert result.code == 0, result.output[-4000:]
    found = json.loads((folder / "answer.json").read_text())
    assert found["different"] == [] and found["unchanged"] and found["moved"]
    print(found)
    assert found["view"] + found["merged"] + found["steps"] == found["tensors"]


@pytest.mark.slow
def test_experts_that_bridge_stacks_are_left_to_it(base, configure, ranks, work):
    base("gpt-oss")
    folder = work / "repeated-gpt-oss"
    folder.mkdir()
    result = ranks("repeated_export", configure("gpt-oss", "adapter.kind=none", f"paths.output={folder}"))
    assert result.code == 0, result.output[-4000:]
    assert "for every step, because recipes cannot be used: aten.copy_.default is not supported" in result.output
    found = json.loads((folder / "answer.json").read_text())
    assert found["different"] == [] and found["view"] + found["merged"] + found["steps"] == 0


class Toy(nn.Module):
    """Weights in the one memory, a part of which is no model's, and what is made of them."""

    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = (nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (2, 4), (6, 2)))

    def exported(self, how):
        yield "tensor", how(self).detach()


def noted(how) -> tuple[recipes.Watch, dict, Toy]:
    toy = Toy()
    watch, found = recipes.Watch([toy]), {}
    assert [name for name, _ in recipes.watched(toy.exported(how), watch, found)] == ["tensor"]
    return watch, found, toy


ROWS, HEADS = torch.tensor([3, 0, 5]), torch.tensor([2, 0])


def heads(rows: torch.Tensor) -> torch.Tensor:
    """Some heads of those in a weight, each of two rows."""
    return rows.view(3, 2, -1)[HEADS].view(4, -1)


HOWS = {
    "rows in another order": lambda toy: toy.base[ROWS].flip(0).reshape(-1),
    "parts of parts": lambda toy: torch.cat(toy.base.chunk(2, 1)[::-1]).chunk(3)[1].t().contiguous(),
    "an adapter": lambda toy: toy.base.float() + 0.5 * (toy.b.float() @ toy.a.float()),
    "half of an adapter": lambda toy: toy.base[:3] + 0.25 * (toy.b[:3] @ toy.a),
    "a product with what is computed": lambda toy: toy.base + 0.5 * (toy.b @ (2.0 * toy.a)),
    "rows that are computed": lambda toy: toy.base[toy.base[:, 0].argsort()],
    "heads of an adapter": lambda toy: heads(toy.base).float() + 0.5 * (heads(toy.b).float() @ toy.a.float()),
}


@pytest.mark.parametrize("how", HOWS)
def test_what_is_made_of_weights_is_made_of_later_ones_alike(how):
    watch, found, toy = noted(HOWS[how])
    assert not watch.refused
    for parameter in toy.parameters():
        parameter.data.normal_()
    assert torch.equal(recipes.compute(found["tensor"], {}), HOWS[how](toy))
    assert recipes.pieces(found["tensor"]) == []
    merged = recipes.merges(found["tensor"])
    assert len(merged) == (0 if "adapter" not in how else 2 if "heads" in how else 1)
    if merged:
        assert torch.equal(torch.cat([one.base + one.scale * (one.b @ one.a) for one in merged]), HOWS[how](toy))


def test_heads_lie_one_behind_another():
    with torch.no_grad():  # as Bridge exports
        _, found, toy = noted(lambda toy: heads(toy.base))
    toy.base.detach().add_(1)
    assert torch.equal(torch.cat(recipes.pieces(found["tensor"])), heads(toy.base))
    _, found, _ = noted(lambda toy: toy.base.view(3, 2, 4)[:, torch.tensor([1])].view(3, 4))
    assert recipes.pieces(found["tensor"]) == []


NOISE = torch.randn(6, 4)


@pytest.mark.parametrize(
    "how, why",
    {
        lambda toy: torch.empty(6, 4).copy_(toy.base): "aten.copy_.default",
        lambda toy: toy.base + NOISE: "aten.add.Tensor",
        lambda toy: torch.randn(3): "tensor",
    }.items(),
)
def test_what_would_be_another_the_next_time_is_refused(how, why):
    assert noted(how)[0].refused == why


def test_a_tensor_that_is_another_is_named():
    metas = [wire.Meta(name, "bfloat16", (100, 7), "") for name in ("first", "second")]
    memory = torch.zeros(wire.used(metas), dtype=torch.uint8)
    for one, place in wire.placed(metas):
        wire.part(memory, one, place).fill_(1)
    other = memory.clone()
    wire.part(other, metas[1], 8192)[3, 3] = 1.0078125  # the next number
    assert filling.first_unlike(metas, other, memory) is None
    wire.part(other, metas[1], 8192)[3, 3] = 1.015625
    assert filling.first_unlike(metas, other, memory) == "second"


BESIDE_TORCH = """
import itertools, torch
from trainer.reinforcement.transfer import wire
from trainer.reinforcement.transfer.repeated import filling, kernels, recipes
from trainer.reinforcement.transfer.repeated.recipes import Merged
from trainer.weights import digests

torch.manual_seed(0)
KINDS = torch.float32, torch.bfloat16
for kind, adapter, rank in itertools.product(KINDS, KINDS, (3, 16, 70)):
    each = [
        Merged(
            torch.randn(2 * rows, columns).to(kind)[rows:],
            torch.randn(rank, columns).to(adapter),
            torch.randn(rows, 2 * rank + 16).to(adapter)[:, 16 : 16 + rank],
            0.5,
        )
        for rows, columns in [(72, 136)] * 3
    ]
    size = 72 * 136 * kind.itemsize
    places = [0, 8 * size, 2 * size]
    memory = torch.zeros(9 * size, dtype=torch.uint8)
    (alike,) = {kernels.Merges.kind(0, one) for one in each}
    assert alike
    kernels.Merges(places, each).fill(memory)
    for one, place in zip(each, places):
        found = memory[place : place + size].view(kind).view(72, 136)
        wanted = one.base.double() + 0.5 * (one.b.double() @ one.a.double())
        bound = 1e-5 if kind is torch.float32 else 1e-2
        assert ((found.double() - wanted).abs() <= bound * (1 + wanted.abs())).all(), (kind, adapter, rank)
    assert memory[3 * size : 8 * size].count_nonzero() == 0
known = Merged(torch.ones(2, 4), torch.ones(3, 4), torch.ones(2, 3), 1.0)
shifted = Merged(torch.ones(9)[1:].view(2, 4), known.a, known.b, 1.0)
assert kernels.Merges.kind(16, known) and not kernels.Merges.kind(8, known) and not kernels.Merges.kind(0, shifted)

memory = torch.randint(0, 256, (1 << 17,), dtype=torch.uint8)
targets = [torch.zeros(count, dtype=torch.bfloat16) for count in (4, 20000, 36)]
places = [8192, 0, 1 << 16]
assert all(map(kernels.Copies.has, places, targets))
assert not kernels.Copies.has(0, torch.zeros(3, dtype=torch.bfloat16))
copies, back = kernels.Copies(places, targets), torch.zeros_like(memory)
copies.empty(memory)
copies.fill(back)
for place, target in zip(places, targets):
    assert torch.equal(target.view(torch.uint8), memory[place:][: target.nbytes])
    assert torch.equal(target.view(torch.uint8), back[place:][: target.nbytes])
assert back.count_nonzero() <= sum(target.nbytes for target in targets)

factors, sums = digests.place_factors(0, 0, 1024, "cpu"), torch.empty(16, dtype=torch.int64)
kernels.row_sums(memory, factors, sums)
assert torch.equal(sums, (memory.view(torch.int64).view(16, 1024) * factors).sum(-1))

torch.Tensor.is_cuda = True
rows, a, b, places = torch.randn(4, 8, 16), torch.randn(3, 16), torch.randn(4, 8, 3), torch.tensor([3, 0, 1])
weights = torch.nn.ParameterList([rows, a, b])
tensors = {
    "heads": lambda: weights[0][places].view(24, 16),
    "merged": lambda: weights[0][places].view(24, 16) + 0.5 * (weights[2][places].view(24, 3) @ weights[1]),
    "view": lambda: weights[0][2],
    "cut": lambda: weights[0][places][:, 1:].reshape(-1),
}
watch, noted = recipes.Watch([weights]), {}
metas = [
    wire.Meta(name, "float32", tuple(one.shape), "")
    for name, one in recipes.watched(((name, make().detach()) for name, make in tensors.items()), watch, noted)
]
filled = filling.Filling(metas, noted)
assert [one.name for one, *_ in filled.steps] == ["cut"] and len(filled.launches) == 2
memory = torch.zeros(wire.used(metas), dtype=torch.uint8)
for weight in weights:
    weight.data.normal_()
filled.fill(memory)
for one, place in wire.placed(metas):
    torch.testing.assert_close(wire.part(memory, one, place), tensors[one.name]().detach(), rtol=1e-5, atol=1e-6)
print("as torch")
"""


def test_kernels_fill_buckets_merge_copy_and_sum_as_torch_does():
    given = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_TORCH], cwd=ROOT, env=given, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.strip() == "as torch", done.stderr[-3000:]


class Inner(nn.Module):
    """A layer of a model as vLLM has it: two matrices in one, of which each worker has some columns."""

    def __init__(self, swaps: bool, computes: bool):
        super().__init__()
        self.swaps, self.computes = swaps, computes
        self.whole = nn.Parameter(torch.zeros(4, 3))
        self.register_buffer("table", torch.ones(5))
        self.kv_cache = torch.zeros(2)
        self.length = torch.zeros(())

    def load(self, halves: list[torch.Tensor]) -> None:
        made = torch.empty(4, 3)
        for number, half in enumerate(halves):
            made[2 * number :][:2].copy_(half[:, 1:4])
        if self.swaps:
            made = torch.cat([made[2:], made[:2]])
        self.whole.data.copy_(made)
        if self.computes:
            self.length = self.whole.norm()
        self.kv_cache.normal_()


def learned(model: Inner, transfers: int = 2) -> tuple[Learned, list[torch.Tensor]]:
    found = None
    buckets: list[torch.Tensor] = []
    for _ in range(transfers):
        watch = Watch(model)
        buckets = [torch.randn(2, 5).repeat(1, 1).view(-1).view(torch.uint8).clone() for _ in range(2)]
        for number, memory in enumerate(buckets):
            watch.arrived(number, memory)
        with watch:
            model.load([memory.view(torch.float32).view(2, 5) for memory in buckets])
        if found is None:
            found = watch.ended()
        else:
            found.compare(model)
    assert found
    return found, buckets


def test_what_was_copied_of_buckets_is_copied_again():
    model = Inner(swaps=False, computes=False)
    found, _ = learned(model)
    assert found.refused(model, sleeps=False) == ""
    buckets = [torch.randn(2, 5) for _ in range(2)]
    for number, bucket in enumerate(buckets):
        found.put(number, bucket.view(-1).view(torch.uint8))
    assert torch.equal(model.whole, torch.cat(buckets)[:, 1:4])


def test_memory_that_a_layer_is_given_behind_a_bucket_is_not_taken_for_it():
    """A bucket's memory is freed while later ones are loaded, and layers are made in what is free."""
    model = Inner(swaps=False, computes=False)
    watch = Watch(model)
    memory = numpy.zeros(48, dtype=numpy.uint8)
    watch.arrived(0, torch.from_numpy(memory))
    bucket = torch.randn(12)
    watch.arrived(1, bucket.view(torch.uint8))
    made = torch.from_numpy(memory.view(numpy.float32).reshape(4, 3))
    with watch:
        made.copy_(bucket.view(4, 3))
        model.whole.data.copy_(made)
    ended = watch.ended()
    assert ended.refusal == "" and [*ended.copies] == [1]


def test_a_layer_that_is_made_where_another_one_was_is_not_taken_for_it():
    """A layer of a CPU packs its weights, and what it loaded is freed without being copied anywhere."""
    model = Inner(swaps=False, computes=False)
    watch, bucket, memory = Watch(model), torch.randn(36), numpy.zeros(144, dtype=numpy.float32)
    watch.arrived(0, bucket.view(torch.uint8))
    with watch:
        torch.from_numpy(memory[:36].reshape(12, 3)).copy_(bucket.view(12, 3))
        small = torch.from_numpy(memory[:12].reshape(4, 3))
        small.copy_(bucket[:12].view(4, 3))
        model.whole.data.copy_(small)
    assert watch.ended().refusal == "layers keep their weights in another form"


def test_the_digest_of_a_tensor_is_of_its_own_bytes_and_of_its_place():
    buckets = [[wire.Meta(f"{number}.{one}", "bfloat16", (5000,), "") for one in range(3)] for number in range(2)]
    memory = torch.randint(0, 256, (2, 3 * 2 * 8192), dtype=torch.uint8)

    def found(changed: tuple[int, int] | None = None) -> torch.Tensor:
        totals = Buckets(buckets, torch.device("cpu"))
        totals.begin()
        for number in (0, 1):
            bucket = memory[number].clone()
            if changed and changed[0] == number:
                bucket[changed[1]] ^= 4
            totals.add(number, bucket)
        return totals.digests()

    assert len(set(found().tolist())) == 6
    assert (found() != found((1, 2 * 8192))).tolist() == [False] * 4 + [True, False]
    assert (found() != found((0, 6 * 8192 - 1))).tolist() == [False] * 2 + [True] + [False] * 3


@pytest.mark.parametrize(
    "swaps, computes, transfers, sleeps, why",
    [
        (True, False, 2, False, "layers keep their weights in another form"),
        (False, True, 2, False, ".length is computed from weights"),
        (False, False, 1, False, "one transfer proves nothing"),
        (False, False, 2, True, ".length is not kept while vLLM sleeps"),
    ],
)
def test_where_copies_are_not_all_that_vllm_does_they_do_not_do(swaps, computes, transfers, sleeps, why):
    model = Inner(swaps, computes)
    assert learned(model, transfers)[0].refused(model, sleeps) == why


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["gloo", "ipc"])
def test_a_policy_is_the_same_whether_transfers_are_repeated_or_not(forked, place, base, work, transport):
    base("llama")
    found = {}
    for module in ("trainer.reinforce", UNPACKED):
        name = f"{module}-{transport}"
        process, folder = forked(name, of_llama(work) | {"reinforce.transport": transport}, module)
        assert process.wait(600) == 0, (place / f"{name}.log").read_text()[-4000:]
        found[module] = answers(folder), of_steps(folder)
    usual, repeated = found.values()
    assert usual[0] == repeated[0]
    assert all(step["probe"] < 1e-5 for step in repeated[1])
    assert ["seconds_export" in step for step in repeated[1]] == [True, True, False, False, False]
    assert all("seconds_export" in step for step in usual[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bit_that_changes_while_a_transfer_is_repeated_ends_the_run(forked, place, base, work):
    base("llama")
    process, folder = forked("flipped", of_llama(work), UNPACKED, PLANTED="flipped")
    assert process.wait(600) == 2
    said = (place / "flipped.log").read_text()
    assert "transfer of weights: model.norm.weight is not what was sent: digest " in said, said[-3000:]
    assert len(of_steps(folder)) == 2


UNPACKED = "tests.support.unpacked_on_a_cpu"


def of_llama(work: Path) -> dict[str, object]:
    keys = ADAPTER | {"paths.model": work / "llama", "paths.base": work / "llama-base", "reinforce.steps": 5}
    return keys | {"reinforce.held_out": 0, "reinforce.lr": 1e-2}
