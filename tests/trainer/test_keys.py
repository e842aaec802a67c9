"""Keys of a training that no other test is about: each has the effect that it says, and no other."""

import pytest


@pytest.fixture(scope="module")
def trained(configure, ranks, base, work):
    """trained(*settings): metrics of the steps of a short training of a small Llama, by step."""
    counted = iter(range(99))

    def trained(*settings: str) -> dict[int, dict]:
        base("llama")
        run = configure("llama", f"paths.output={work}/keys-{next(counted)}", "train.steps=3", *settings)
        result = ranks("train", run)
        assert result.code == 0, result.output
        return {line["step"]: line for line in result.metrics if line["kind"] == "train"}

    return trained


def losses(found: dict[int, dict]) -> list[float]:
    return [line["lm_loss"] for line in found.values()]


def test_dropout_disturbs_each_step_of_training_alike_at_the_same_seed(trained):
    plain, dropped, again = trained(), trained("model.dropout=0.5"), trained("model.dropout=0.5")
    assert losses(dropped) == losses(again)
    assert all(abs(one - other) > 1e-3 for one, other in zip(losses(plain), losses(dropped), strict=True))
