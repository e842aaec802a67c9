"""Training resumes exactly, stops when nothing is learned, and reports what it did."""

import functools
import json
import shutil
from pathlib import Path

import pytest
from pyarrow import parquet

from contract import checkpoints
from trainer.data import prepared
from trainer.training import resume


def losses(result) -> dict[int, float]:
    return {line["step"]: line["lm_loss"] for line in result.metrics if line["kind"] == "train"}


def norms(result) -> dict[int, float]:
    return {line["step"]: line["grad_norm"] for line in result.metrics if line["kind"] == "train"}


def close(found: dict, expected: dict, bound: float) -> bool:
    return found.keys() == expected.keys() and all(abs(found[s] - expected[s]) <= bound * expected[s] for s in found)


@pytest.fixture(scope="module")
def undisturbed(configure, ranks, base, work):
    base("glm4-moe")
    run = configure("glm4-moe", f"paths.output={work}/undisturbed", "checkpoint.save_every=3")
    result = ranks("train", run)
    assert result.code == 0, result.output
    return run, result


@pytest.fixture(scope="module")
def halfway(configure, ranks, base, work) -> Path:
    """What the same training has written when it is stopped after step 3 of 6."""
    base("glm4-moe")
    folder = work / "halfway"
    run = configure("glm4-moe", f"paths.output={folder}", "checkpoint.save_every=3", "train.stop_after=3")
    result = ranks("train", run)
    assert result.code == 0, result.output
    return folder


def test_metrics_say_what_a_step_did(undisturbed):
    _, result = undisturbed
    line = next(line for line in result.metrics if line["kind"] == "train" and line["step"] == 6)
    assert line["samples"] == 24
    assert line["tokens"] == 24 * 64
    assert line["lr"] >= 0
    assert line["grad_norm"] > 0
    assert line["aux_loss"] > 0
    assert line["expert_load_max"] >= line["expert_load_mean"] >= 1
    assert {"step_seconds", "tokens_per_second", "tflops", "memory_gb", "lm_loss"} <= line.keys()
    assert "mfu" not in line  # a CPU has no peak on record
    assert losses(result)[6] < losses(result)[1]


def test_padding_is_counted_apart(undisturbed):
    run, result = undisturbed
    line = next(line for line in result.metrics if line["kind"] == "train" and line["step"] == 6)
    rows = parquet.read_table(prepared.folder(run) / "training.idx.parquet")["input_ids"].to_pylist()
    tokens = sum(len(row) - 1 for row in rows)  # the last one is only a label
    assert line["padding"] == pytest.approx(1 - tokens / (64 * len(rows))) and 0 < line["padding"] < 1
    batch = run.train.global_batch * 64 * tokens / (64 * len(rows))
    assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(batch)


def test_a_checkpoint_records_what_it_is_of(undisturbed, configure):
    """Also as far as Megatron-Bridge's own file does: it is all that older checkpoints have."""
    run, _ = undisturbed
    folder = Path(run.paths.output) / "checkpoints"
    cut = ["layout.gpus_per_node=4", "layout.ep=2", "layout.tp=2", "layout.sp=true"]
    same = configure("glm4-moe", f"paths.output={run.paths.output}", *cut, "train.micro_batch=1")
    resume.check(same, folder)
    resume.check_data(same, folder)
    recorded = json.loads((folder / "iter_0000006" / checkpoints.MARK).read_text())["training"]
    assert recorded["base"]["digest"] and len(recorded["tokens"]) == 64
    known = resume._from_bridge(folder / "iter_0000006" / "run_config.yaml")
    assert {*resume.IN_BRIDGE, "train.precision", "adapter.kind", "adapter.experts"} == {*known}
    assert known.items() <= recorded["keys"].items()


def test_killed_between_checkpoints_it_repeats_the_lost_steps_to_the_last_bit(undisturbed, configure, ranks, work):
    _, whole = undisturbed
    run = configure("glm4-moe", f"paths.output={work}/killed", "checkpoint.save_every=3")
    killed = ranks("train", run, kill_at=4)
    assert killed.code == -9
    assert checkpoints.complete_steps(Path(run.paths.output) / "checkpoints") == [3]
    resumed = ranks("train", run)
    assert resumed.code == 0, resumed.output
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize(
    "layout",
    [
        "tp=2 sp=true ep=2",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("pp=2 vpp=2", "pp=4", "dp=2", "ep=2")),
    ],
)
def test_resumes_at_another_layout(layout, undisturbed, halfway, configure, ranks, work):
    _, whole = undisturbed
    output = work / layout.replace(" ", "-")
    shutil.copytree(halfway, output)
    cut = [f"layout.{pair}" for pair in layout.split() if not pair.startswith("dp")]
    world = f"layout.gpus_per_node={4 if 'pp=4' in layout else 2}"
    resumed = ranks("train", configure("glm4-moe", f"paths.output={output}", "checkpoint.save_every=3", world, *cut))
    assert resumed.code == 0, resumed.output
    assert close(losses(resumed), losses(whole), 1e-4)


def test_an_incomplete_checkpoint_is_not_resumed_from(undisturbed, configure, ranks, work):
    _, whole = undisturbed
    run = configure("glm4-moe", f"paths.output={work}/cut", "checkpoint.save_every=3")
    ranks("train", configure("glm4-moe", f"paths.output={work}/cut", "checkpoint.save_every=2", "train.stop_after=4"))
    newest = Path(run.paths.output) / "checkpoints" / "iter_0000004"
    part = next(newest.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    result = ranks("train", run)
    assert f"removed {newest}" in result.output
    assert close(losses(result), losses(whole), 0)


def test_finished_it_says_so_and_does_nothing(undisturbed, ranks):
    run, whole = undisturbed
    again = ranks("train", run)
    assert again.code == 0
    assert "step 6 of 6 already exists" in again.output
    assert again.metrics == whole.metrics


def test_stops_when_nothing_is_learned(configure, ranks, base, work):
    base("glm4-moe")
    result = ranks("train", configure("glm4-moe", f"paths.output={work}/still", "optimizer.lr=1e-300"))
    assert result.code == 2
    assert "error: nothing is learned after 2 steps" in result.output
    assert "have not changed" in result.output


def test_logs_the_recomputation_and_layout_that_take_effect(configure, ranks, base, work):
    base("glm4-moe")
    run = configure("glm4-moe", f"paths.output={work}/recompute", "train.recompute=full", "train.steps=3")
    result = ranks("train", run)
    assert result.code == 0, result.output  # frozen base, full recomputation, one stage: the gate passes
    effective = next(line for line in result.metrics if line["kind"] == "effective")
    assert effective["recompute"] == "full uniform 1"
    assert "recompute full uniform 1" in result.output


@pytest.mark.parametrize(
    "kind, targets, modules",
    [
        ("deepseek-v3", "[linear_q_down_proj,linear_kv_down_proj]", "[layernorm,mla_up_proj]"),
        pytest.param("qwen3-moe", "[linear_fc1,linear_fc2]", "[moe]", marks=pytest.mark.slow),
    ],
)
def test_single_modules_are_recomputed_behind_a_frozen_embedding(kind, targets, modules, configure, ranks, base, work):
    base(kind)
    adapters = (f"adapter.targets={targets}", "adapter.dropout=0", "train.steps=3")
    whole = ranks("train", configure(kind, f"paths.output={work}/kept", *adapters))
    again = ("train.recompute=selective", f"train.recompute_modules={modules}")
    result = ranks("train", configure(kind, f"paths.output={work}/again", *adapters, *again))
    assert result.code == 0, result.output
    assert close(losses(result), losses(whole), 1e-6)


def test_trains_all_weights(configure, ranks, base, work):
    base("llama")
    run = configure("llama", f"paths.output={work}/none", "adapter.kind=none", "optimizer.lr=1e-3")
    result = ranks("train", run)
    assert result.code == 0, result.output
    assert losses(result)[6] < losses(result)[1]


@pytest.fixture(scope="module")
def dora(configure, ranks, base, work):
    """dora(*cut) -> a training of DoRA at this layout."""
    base("llama")

    @functools.cache
    def dora(*cut: str):
        settings = ("adapter.kind=dora", "optimizer.lr=1e-3", *cut)
        return ranks("train", configure("llama", f"paths.output={work}/dora-{len(cut)}", *settings))

    return dora


def test_trains_dora(dora):
    found = losses(dora())
    assert found[6] < found[1], dora().output[-2000:]


@pytest.mark.slow
def test_trains_dora_the_same_at_tensor_parallel_two(dora):
    """Its gradients at two are compared with one process's in tests/trainer/megatron/test_gradients.py."""
    two = dora("layout.gpus_per_node=2", "layout.tp=2", "layout.sp=true")
    assert close(losses(two), losses(dora()), 1e-4), two.output[-2000:]


@pytest.mark.parametrize(
    "cut",
    [
        "layout.gpus_per_node=2 layout.ep=2",
        pytest.param(
            "layout.gpus_per_node=4 layout.tp=2 layout.sp=true layout.ep=2 layout.etp=2", marks=pytest.mark.slow
        ),
    ],
)
def test_an_adapter_that_experts_share_is_the_same_model_at_any_layout(cut, configure, ranks, base, work):
    """Its copies count once in the norm of gradients, by which they are clipped, and etp cuts it rightly."""
    base("glm4-moe")
    shared = ("adapter.experts=shared", "train.steps=3", "optimizer.clip_grad=0.1")
    one = ranks("train", configure("glm4-moe", f"paths.output={work}/shared-one", *shared))
    many = ranks("train", configure("glm4-moe", f"paths.output={work}/shared-{len(cut)}", *shared, *cut.split()))
    assert many.code == 0, many.output
    assert close(losses(many), losses(one), 1e-5)
    assert close(norms(many), norms(one), 1e-4)


def test_packed_is_the_same_loss_as_unpacked(configure, ranks, base, work):
    """One step over the same rows, each row in a sequence of its own, or several in one."""
    base("llama")
    rows = [json.loads(line) for line in (work / "data" / "training.jsonl").read_text().splitlines()]
    short = [row for row in rows if len(row["input"]) + len(row["output"]) < 60][:4]
    (work / "few").mkdir()
    (work / "few" / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    common = ["train.steps=1", f"paths.data={work}/few", "optimizer.warmup_steps=0", "optimizer.decay=constant"]
    apart = ranks("train", configure("llama", f"paths.output={work}/apart", *common, "train.global_batch=4"))
    packed = ["train.global_batch=1", "train.micro_batch=1", "data.packed=true", "data.seq_length=512"]
    together = ranks("train", configure("llama", f"paths.output={work}/pack", *common, *packed))
    assert together.code == 0, together.output
    assert abs(losses(together)[1] - losses(apart)[1]) < 1e-5


def test_a_frozen_router_stays_as_released(configure, ranks, base, work):
    base("glm4-moe")
    full = ["adapter.kind=none", "train.steps=2", "optimizer.warmup_steps=0", "moe.freeze_router=true"]
    run = configure("glm4-moe", f"paths.output={work}/frozen", *full)
    assert (done := ranks("train", run)).code == 0, done.output
    before, after = weights(Path(run.paths.base) / "iter_0000000"), weights(work / "frozen/checkpoints/iter_0000002")
    routers = {name for name in before if ".router." in name}
    assert routers
    assert all((before[name] == after[name]).all() for name in routers)
    changed = [name for name in before if name not in routers and not (before[name] == after[name]).all()]
    assert len(changed) > 10


def weights(folder: Path) -> dict:
    from trainer.weights import torch_dist

    found = torch_dist.open_checkpoint(folder)
    return {name: torch_dist.read(found, place) for name, place in found.places.items()}
