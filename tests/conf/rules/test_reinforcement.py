"""conf/rules/reinforcement.py: where vLLM may be, and when it may sample, said in one line before anything starts."""

import pytest

from conf.load import load
from conf.planner.hardware import GB, GPUS
from conf.planner.serving import rollout
from conf.planner.verdict import facts_of
from conf.rules.gpus import takes
from conf.rules.reinforcement import transport, unlike
from contract.faults import ConfigError

GPU, FULL, CPU = "qwen3-30b-a3b-1xh200", "qwen3-30b-a3b-full-8xh200", "tiny-rl"


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        (
            GPU,
            ["reinforce.staleness=1"],
            "reinforce.staleness: 1, but vLLM and Megatron share one GPU: reinforce.engine_gpus=1",
        ),
        (GPU, ["reinforce.engines=2"], "reinforce.engines: 2, but vLLM and Megatron share one GPU: reinforce."),
        (
            GPU,
            ["reinforce.engine_gpus=1", "reinforce.transport=ipc"],
            "reinforce.transport: ipc uses the memory of one GPU, but vLLM has separate GPUs: nccl, or null",
        ),
        (CPU, ["reinforce.engine_gpus=1"], "reinforce.engine_gpus: 1, but hardware.gpu is cpu: 0"),
        (
            CPU,
            ["reinforce.staleness=1", "reinforce.correction=none"],
            "reinforce.correction: none would treat answers of older policies as the current policy's: tis",
        ),
        (
            CPU,
            ["reinforce.hosts=2", "reinforce.transport=files"],
            "reinforce.transport: files works within one host, but vLLM",
        ),
        (
            CPU,
            ["reinforce.hosts=2", "reinforce.engines=2"],
            "reinforce.engines: 2 on each of 2 separate hosts, but",
        ),
        (
            GPU,
            ["reinforce.hosts=2", "reinforce.engine_gpus=0"],
            "reinforce.engine_gpus: 0 shares the GPUs of training, but vLLM has 2 separate hosts",
        ),
        (GPU, ["reinforce.engine_gpus=-1"], "reinforce.engine_gpus: "),
        (
            GPU,
            ["reinforce.engine_gpus=2", "reinforce.in_turn=true"],
            "reinforce.engine_gpus: 2, but training, which shares its GPUs, has 1 (layout.gpus_per_node): as many",
        ),
        (
            FULL,
            ["reinforce.engine_gpus=4", "reinforce.engines=3", "reinforce.in_turn=true"],
            "reinforce.engine_gpus: 4 for each of 3 engines, but training, which shares its GPUs, has 8",
        ),
        (
            FULL,
            ["reinforce.engine_gpus=8", "reinforce.in_turn=true", "reinforce.staleness=1"],
            "reinforce.staleness: 1, but vLLM and Megatron share GPUs: reinforce.in_turn=false",
        ),
        (
            FULL,
            ["reinforce.engine_gpus=8", "reinforce.in_turn=true", "reinforce.transport=nccl"],
            "reinforce.transport: nccl needs separate GPUs for vLLM: reinforce.in_turn=false, or null",
        ),
        (
            GPU,
            ["reinforce.in_turn=false"],
            "reinforce.in_turn: false, but reinforce.engine_gpus 0 gives vLLM no separate GPU",
        ),
        (CPU, ["reinforce.in_turn=true"], "reinforce.in_turn: true, but hardware.gpu is cpu: null"),
        (
            GPU,
            ["reinforce.hosts=2", "reinforce.engine_gpus=1", "reinforce.in_turn=true"],
            "reinforce.in_turn: true shares the GPUs of training, but vLLM has 2 separate hosts: null",
        ),
        (
            FULL,
            ["reinforce.hosts=2", "reinforce.engine_gpus=4", "reinforce.engines=3"],
            "reinforce.engines: 3 with 4 GPUs on each of 2 separate hosts, but layout.gpus_per_node is 8",
        ),
        (CPU, ["reinforce.engines=0"], "reinforce.engines: "),
        (
            CPU,
            ["reinforce.prompts=1000000000"],
            "reinforce.prompts: 1,000,000,000 with 8 answers each; a step has 1,048,576 answers at most",
        ),
        (
            CPU,
            ["reinforce.hosts=1000"],
            "reinforce.hosts: 1000, but each engine needs one of the 16 prompts of a step: 16 at most",
        ),
        (
            FULL,
            ["reinforce.hosts=3", "reinforce.engine_gpus=1", "reinforce.engines=8"],
            "reinforce.hosts: 3 with 8 engines each, but each engine needs one of the 16 prompts of a step: 2",
        ),
    ],
)
def test_what_does_not_go_together_is_said_beforehand(name, overrides, said):
    with pytest.raises(ConfigError) as error:
        load(name, ["reinforce.steps=10", *overrides])
    (line,) = [one for one in str(error.value).splitlines() if said in one]
    assert line.startswith("override reinforce.")


def test_engines_have_gpus_behind_those_of_training():
    keys = ["reinforce.steps=10", "reinforce.staleness=2", "reinforce.engines=3", "reinforce.engine_gpus=1"]
    assert takes(load(GPU, keys), "reinforce").gpus == 4 and takes(load(GPU, keys), "train").gpus == 1
    assert takes(load(CPU, ["reinforce.staleness=2", "reinforce.engines=3"]), "reinforce").gpus == 1


def test_an_engine_over_several_gpus_has_them_of_training_or_behind_it():
    keys = ["reinforce.steps=10", "reinforce.engines=2", "reinforce.engine_gpus=4"]
    assert takes(load(FULL, keys), "reinforce").gpus == 16
    assert takes(load(FULL, [*keys, "reinforce.in_turn=true"]), "reinforce").gpus == 8
    assert takes(load(CPU, ["reinforce.engine_gpus=2"]), "reinforce").gpus == 1


def test_a_gang_s_hosts_have_gpus_for_training_and_for_the_engines_behind_it():
    keys = ["reinforce.steps=10", "layout.nodes=2", "gang.engine=slurm"]

    def share(*more: str) -> tuple[int, int | None, str | None]:
        found = takes(load(FULL, [*keys, *more]), "reinforce")
        return found.hosts, found.gpus, found.engine

    assert share("reinforce.engine_gpus=8", "reinforce.in_turn=true") == (2, 8, "slurm")
    assert share("layout.gpus_per_node=4", "reinforce.engine_gpus=4") == (2, 8, "slurm")
    assert share("reinforce.hosts=3", "reinforce.engine_gpus=4", "reinforce.engines=2") == (5, 8, "slurm")
    one = ["reinforce.steps=10", "reinforce.engine_gpus=8", "reinforce.in_turn=true"]
    assert takes(load(FULL, [*one, "gang.engine=slurm"]), "reinforce").engine == "slurm"  # as training's
    assert takes(load(FULL, one), "reinforce").engine is None


def test_a_model_that_cannot_be_cut_over_so_many_gpus_is_refused():
    run = load(FULL, ["reinforce.steps=10", "reinforce.engine_gpus=3", "reinforce.in_turn=true"])
    assert unlike(run, facts_of(run)).startswith(
        "reinforce.engine_gpus is 3, which does not divide num_attention_heads"
    )
    run = load(FULL, ["reinforce.steps=10", "reinforce.engine_gpus=8", "reinforce.in_turn=true"])
    assert unlike(run, facts_of(run)) == ""


def test_hosts_of_vllm_are_beside_that_of_training():
    share = takes(load(GPU, ["reinforce.steps=10", "reinforce.hosts=3", "reinforce.engine_gpus=1"]), "reinforce")
    assert (share.hosts, share.gpus, share.engine) == (4, 1, "local")
    assert takes(load(CPU, []), "reinforce").engine is None


@pytest.mark.parametrize(
    ("name", "on_gpus", "keys", "way"),
    [
        (CPU, False, [], "gloo"),
        (CPU, False, ["reinforce.engines=2"], "gloo"),
        (GPU, True, [], "ipc"),
        (GPU, True, ["reinforce.engine_gpus=1"], "nccl"),
        (GPU, True, ["reinforce.engine_gpus=1", "reinforce.transport=gloo"], "gloo"),
        (GPU, True, ["reinforce.transport=files"], "files"),
        (FULL, True, ["reinforce.engine_gpus=4", "reinforce.engines=2", "reinforce.in_turn=true"], "ipc"),
        (CPU, False, ["reinforce.engine_gpus=2"], "gloo"),
        (GPU, True, ["reinforce.engine_gpus=1", "reinforce.hosts=2"], "nccl"),
        (CPU, False, ["reinforce.hosts=2"], "gloo"),
    ],
)
def test_weights_go_from_gpu_to_gpu_where_both_have_one(name, on_gpus, keys, way):
    assert transport(load(name, ["reinforce.steps=10", *keys]), on_gpus) == way


def test_the_plan_counts_on_the_way_that_the_trainer_takes():
    def seconds(*keys: str) -> float:
        run = load(GPU, ["reinforce.steps=10", "reinforce.engine_gpus=1", *keys])
        found = rollout.of(run, facts_of(run), GPUS["h200"]).seconds
        assert found
        return found.transfer

    assert seconds() == seconds("reinforce.transport=nccl") < seconds("reinforce.transport=gloo")
    assert 61.1 * GB / rollout.TRANSFER["nccl"] == pytest.approx(seconds(), rel=0.01)
