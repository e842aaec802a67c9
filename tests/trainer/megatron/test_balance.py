"""Routers are trained the same, however rows lie in batches: one to a sequence or several, padded, at any layout."""

import json
from pathlib import Path

import pytest
import torch

from conf.rules.auxiliary_losses import is_balanced
from trainer.megatron.routers.rows_of_tokens import rows_of
from trainer.weights import torch_dist

KEYS = ("adapter.kind=none", "moe.aux_loss_coeff=0.5", "moe.z_loss_coeff=0.1", "train.steps=1", "optimizer.lr=1e-3")
PACKED = ("train.global_batch=1", "train.micro_batch=1", "data.packed=true", "data.seq_length=512")
FAMILIES = ["minimax-m2", "glm4-moe-mtp"]  # aux_loss and a bias that moves; seq_aux_loss and an MTP layer
SLOW = ["glm4-moe", "glm4-moe-lite", "deepseek-v3", "kimi-k2", "qwen3-moe", "olmoe", "mixtral", "qwen2-moe"]
LAYOUTS = ("layout.tp=2 layout.sp=true layout.ep=2", "layout.pp=2 layout.vpp=2 train.micro_batch=1", "")
FIGURES = ("lm_loss", "mtp_loss", "aux_loss", "router_z_loss", "grad_norm")


@pytest.fixture(scope="module")
def trained(configure, ranks, base, work):
    """trained(kind, *overrides) -> figures of one step over four short rows, and the experts' biases after it."""
    rows = [json.loads(line) for line in (work / "data" / "training.jsonl").read_text().splitlines()]
    short = [row for row in rows if len(row["input"]) + len(row["output"]) < 60][:4]
    (work / "four").mkdir()
    (work / "four" / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    known: dict[tuple[str, ...], tuple[dict, dict]] = {}

    def trained(kind: str, *overrides: str) -> tuple[dict, dict]:
        asked = kind, *dict.fromkeys(" ".join(overrides).split())  # a layout repeats what packed rows ask for
        if asked not in known:
            base(kind)
            output = work / f"balance-{len(known)}"
            done = ranks(
                "train", configure(kind, f"paths.data={work}/four", f"paths.output={output}", *KEYS, *asked[1:])
            )
            assert done.code == 0, done.output[-3000:]
            step = next(line for line in done.metrics if line["kind"] == "train")
            known[asked] = {name: step[name] for name in FIGURES if name in step}, biases(output)
        return known[asked]

    return trained


def biases(output: Path) -> dict[str, list[float]]:
    found = torch_dist.open_checkpoint(output / "checkpoints" / "iter_0000001")
    names = [name for name in found.places if name.endswith("expert_bias")]
    return {name: torch_dist.read(found, found.places[name]).flatten().tolist() for name in names}


def same(found: tuple[dict, dict], expected: tuple[dict, dict]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert found[1] == expected[1]


@pytest.mark.parametrize("kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_a_row_trains_routers_the_same_wherever_it_lies(kind, trained):
    apart = trained(kind)
    assert {"aux_loss", "router_z_loss"} <= apart[0].keys() and all(apart[0].values())
    same(trained(kind, *PACKED), apart)
    same(trained(kind, "data.seq_length=128", "train.micro_batch=1"), apart)


def test_routers_are_the_same_on_ranks_that_share_a_packed_row_and_compute_it_again(trained):
    same(trained(FAMILIES[1], *PACKED, "layout.gpus_per_node=2 layout.cp=2 train.recompute=full"), trained(FAMILIES[1]))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [(), PACKED])
@pytest.mark.parametrize("cut", [*LAYOUTS, "layout.pp=2 train.recompute=full train.micro_batch=1", "layout.cp=2"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_routers_are_the_same_at_every_layout(kind, cut, packed, trained):
    if packed and (not cut or "vpp" in cut):
        pytest.skip("one packed row is one microbatch: two ranks of data parallelism cannot share it, vpp needs more")
    same(trained(kind, *packed, "layout.gpus_per_node=2", cut), trained(kind))


def test_preferences_weigh_both_answers_alike():
    mask = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 0]])
    rows = rows_of(mask, None, 1, weight=4)
    assert (rows.share * rows.length).tolist() == [[4, 4, 0]]


def test_rows_end_with_what_is_learned_last():
    apart = torch.tensor([[0, 1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0], [0] * 8])
    rows = rows_of(apart, None, 3)
    assert rows.number[0].tolist() == [[0, 0, 0, 3, 3, 3, 3, 3], [1, 1, 1, 3, 3, 3, 3, 3], [3] * 8]
    assert rows.number[2].tolist() == [[0] + [3] * 7, [1] + [3] * 7, [3] * 8]
    assert rows.length[:, :2].tolist() == [[3, 3], [2, 2], [1, 1]]
    assert (rows.share * rows.length).tolist() == [[2, 1, 0, 0]] * 3
    packed, cut = apart[:, :4].reshape(1, 12), torch.tensor([[0, 4, 8, 12, 12]])
    again = rows_of(packed, cut, 3)
    padding = again.length.size(1) - 1
    assert again.number[0].tolist() == [[0, 0, 0, padding, 1, 1, 1] + [padding] * 5]
    assert torch.equal(again.length[:, :2], rows.length[:, :2]) and torch.equal(again.share[:, :2], rows.share[:, :2])


@pytest.mark.parametrize(
    "kind, overrides, expected",
    [
        *((kind, [], True) for kind in (*FAMILIES, *SLOW)),
        ("gpt-oss", [], False),
        ("gpt-oss", ["moe.balance=aux_loss", "moe.aux_loss_coeff=0.1"], True),
        ("llama", ["moe.z_loss_coeff=0.1"], False),
        ("qwen3-moe", ["moe.balance=none"], False),
        ("qwen3-moe", ["moe.balance=none", "moe.z_loss_coeff=0.1"], True),
        ("olmoe", ["moe.aux_loss_coeff=0"], False),
        ("glm4-moe", ["moe.balance=none", "adapter.kind=none"], False),
        ("deepseek-v3", ["moe.balance=none"], False),
        ("deepseek-v3", ["moe.balance=none", "adapter.kind=none"], True),
        ("minimax-m2", ["moe.balance=none", "adapter.kind=none", "moe.freeze_router=true"], False),
    ],
)
def test_the_fingerprint_knows_which_routers_are_trained(kind, overrides, expected, configure, ranks):
    run = configure(kind, *overrides)
    assert is_balanced(run, json.loads((Path(run.paths.model) / "config.json").read_text())) == expected
    if kind != "llama":
        done = ranks("routers_of", run)
        (found,) = (json.loads(line) for line in done.output.splitlines() if line.startswith('{"trained"'))
        assert found["trained"] == expected


def test_the_gradient_of_mtp_layers_has_their_weight(trained):
    """It is g + s * h with the weight s, so the square of its norm is a polynomial of the second degree."""
    scales = [f"model.mtp_loss_scale={scale}" for scale in (0.0, 0.2, 0.4, 0.6)]
    none, low, middle, high = (trained("glm4-moe-mtp", scale)[0]["grad_norm"] ** 2 for scale in scales)
    assert none - 3 * low + 3 * middle - high == pytest.approx(0, abs=1e-5 * high)
    assert none - 2 * low + middle > 1e-3 * none
