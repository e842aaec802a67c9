"""A training ends at a loss or a gradient that is not a number, and saves nothing of that step."""

import pytest


def test_a_training_ends_at_a_loss_that_is_no_number(base, configure, ranks, tmp_path):
    base("llama")
    done = ranks("train_to_nan", configure("llama", "checkpoint.save_every=1", f"paths.output={tmp_path}"))
    assert done.code and "RuntimeError: step 2: lm loss is nan" in done.output, done.output[-3000:]
    assert [line["step"] for line in done.metrics if line["kind"] == "train"] == [1]
    assert [path.name for path in (tmp_path / "checkpoints").glob("iter_*")] == ["iter_0000001"]


@pytest.mark.parametrize("ranks_of_it, clip", [(1, 0), (1, 1), pytest.param(2, 0, marks=pytest.mark.slow)])
def test_a_training_ends_at_a_gradient_that_is_no_number(ranks_of_it, clip, base, configure, ranks, tmp_path):
    """The rank that it is of says so, clipping or not: alone, by the norm that gradients are clipped by."""
    base("llama")
    keys = ["checkpoint.save_every=1", f"paths.output={tmp_path}", f"optimizer.clip_grad={clip}"]
    done = ranks("train_to_nan_gradient", configure("llama", *keys, f"layout.gpus_per_node={ranks_of_it}"))
    assert done.code and "RuntimeError: step 2: found NaN in local grad norm: that of bucket 0 is nan" in done.output
    complete = [path.parent.name for path in (tmp_path / "checkpoints").glob("iter_*/complete.json")]
    assert complete == ["iter_0000001"]
