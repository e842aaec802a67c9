"""Training that reads the release itself has the same losses, to the last bit, as from a converted base."""

from pathlib import Path

import pytest

from trainer import layouts

slow = pytest.mark.slow
OFTEN = ("glm4-moe", "tp=2 sp=true ep=2")
CASES = dict.fromkeys((case.model, case.cut) for case in layouts.TABLE)


@pytest.fixture
def both(configure, ranks, tmp_path):
    """both(kind, *overrides) -> losses of a training from a converted base, and of one from the release."""

    def both(kind: str, *overrides: str) -> list[list[float]]:
        losses = []
        for to in ("torch_dist", "none"):
            paths = [f"paths.{name}={tmp_path / to / name}" for name in ("base", "output", "logs")]
            given = [*paths, f"convert.to={to}", "train.steps=2", "checkpoint.save_every=1"]
            model = [one for one in overrides if one.startswith(("model.", "train.precision", "paths.model"))]
            converted = ranks("convert", configure(kind, *given, *model))
            assert converted.code == 0, converted.output
            trained = ranks("train", configure(kind, *given, *overrides))
            assert trained.code == 0, trained.output
            losses.append([line["lm_loss"] for line in trained.metrics if line["kind"] == "train"])
        assert all(len(found) == 2 for found in losses)
        return losses

    return both


def cut(model: str, layout: str, folder: Path) -> list[str]:
    """The overrides of a layout of trainer/layouts.py."""
    run = layouts.configured(layouts.Case(model, layout), folder, 1)
    degrees = {key: value for key, value in run.layout.model_dump().items() if value not in (None, False)}
    found = [f"layout.{key}={str(value).lower()}" for key, value in degrees.items()]
    return [*found, "train.micro_batch=1", f"adapter.targets=[{','.join(run.adapter.names)}]"]


@pytest.mark.parametrize(
    ("kind", "layout"), [pytest.param(*one, marks=() if one == OFTEN else slow) for one in CASES if one[1]]
)
def test_losses_are_those_of_a_converted_base_to_the_last_bit(kind, layout, both, tmp_path):
    converted, direct = both(kind, *cut(kind, layout, tmp_path))
    assert converted == direct
    assert sum(file.stat().st_size for file in (tmp_path / "none/base").rglob("*.distcp")) < 2**20
