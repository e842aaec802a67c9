"""What each stage takes of which hosts, and whether the base is evaluated beside training."""

import pytest

from conf.load import load
from conf.rules.gpus import Share, beside, takes
from conf.schema.run import Run


def run(*overrides: str) -> Run:
    return load("tiny", overrides, illegal=True)


@pytest.mark.parametrize(
    ("stage", "overrides", "share"),
    [
        ("train", ["layout.gpus_per_node=4"], Share(1, 4)),
        ("train", ["layout.nodes=2", "layout.gpus_per_node=2"], Share(2, 2, "local")),
        ("train", ["layout.nodes=2", "gang.engine=prefect"], Share(2, 1, "prefect")),
        ("reference", ["layout.gpus_per_node=4"], Share(1, 4)),
        ("reference", ["layout.nodes=2", "gang.engine=slurm"], Share(2, 1, "slurm")),
        ("convert", ["layout.gpus_per_node=4"], Share(1, 0)),
        ("evaluate-base", [], Share(1, None)),
        ("evaluate-tuned", ["evaluate.gpus=2"], Share(1, 2)),
        ("evaluate", ["evaluate.nodes=2", "layout.gpus_per_node=8", "gang.engine=slurm"], Share(2, 8, "slurm")),
        ("evaluate", ["evaluate.engine=prefect", "evaluate.gpus=4"], Share(1, 4, "prefect")),
        ("export", ["layout.gpus_per_node=8"], Share(1, 0)),
    ],
)
def test_a_stage_takes_what_its_command_uses(stage, overrides, share):
    assert takes(run(*overrides), stage) == share


def test_an_engine_on_the_flow_s_own_host_has_all_members_there():
    assert Share(2, 2, "local").of(8) == 4 and Share(2, 2, "slurm").of(8) == 2
    assert Share(1, None).of(8) == 8 and Share(1, 0).of(8) == 0


def test_evaluations_leave_a_flow_s_host_without_gpus_for_an_engine_that_finds_some():
    away = run("gang.engine=slurm", "layout.gpus_per_node=8", "evaluate.gpus=4")
    assert takes(away, "evaluate-base") == Share(1, 4)
    assert takes(away, "evaluate-base", leaves=True) == Share(1, 4, "slurm") and not takes(away, "export", True).gpus
    assert takes(run(), "evaluate-base", leaves=True).here


@pytest.mark.parametrize(
    ("overrides", "host", "expected"),
    [
        ([], 0, True),
        ([], 1, False),
        (["layout.gpus_per_node=4", "evaluate.gpus=4"], 8, True),
        (["layout.gpus_per_node=4", "evaluate.gpus=4"], 7, False),
        (["layout.gpus_per_node=4"], 8, False),  # which evaluation would have all of
        (["layout.nodes=2", "layout.gpus_per_node=2", "evaluate.gpus=4"], 8, True),
        (["layout.nodes=2", "gang.engine=slurm"], 0, False),
        (["evaluate.engine=prefect", "evaluate.gpus=1"], 8, False),
    ],
)
def test_the_base_is_evaluated_beside_training_where_both_fit(overrides, host, expected):
    assert beside(run(*overrides), host) is expected
