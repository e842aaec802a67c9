"""trainer/training/metrics.py: a training ends at a loss that is no number, and saves nothing of that step."""


def test_a_training_ends_at_a_loss_that_is_no_number(base, configure, ranks, tmp_path):
    base("llama")
    done = ranks("train_to_nan", configure("llama", "checkpoint.save_every=1", f"paths.output={tmp_path}"))
    assert done.code and "RuntimeError: step 2: lm loss is nan" in done.output, done.output[-3000:]
    assert [line["step"] for line in done.metrics if line["kind"] == "train"] == [1]
    assert [path.name for path in (tmp_path / "checkpoints").glob("iter_*")] == ["iter_0000001"]
