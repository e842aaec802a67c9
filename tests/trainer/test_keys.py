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
        assert result.code == 0 or "error: " in result.output, result.output
        if result.code:
            return {0: {"refused": result.output}}
        return {line["step"]: line for line in result.metrics if line["kind"] == "train"}

    return trained


@pytest.fixture(scope="module")
def plain(trained) -> list[float]:
    """Losses of the training without any setting."""
    return losses(trained())


def losses(found: dict[int, dict]) -> list[float]:
    return [line["lm_loss"] for line in found.values()]


def test_dropout_disturbs_each_step_of_training_alike_at_the_same_seed(plain, trained):
    """Another seed drops other values from the first step on."""
    dropped, again = trained("model.dropout=0.5"), trained("model.dropout=0.5")
    assert losses(dropped) == losses(again)
    assert all(abs(one - other) > 1e-3 for one, other in zip(plain, losses(dropped), strict=True))
    assert losses(trained("model.dropout=0.5", "train.seed=7"))[0] != losses(dropped)[0]


def test_each_seed_decides_its_own_draws(plain, trained):
    """B starts at 0: another adapter does not show in the first loss."""
    reordered, redrawn = losses(trained("data.seed=7")), losses(trained("train.seed=7"))
    assert reordered[0] != plain[0], "other rows"
    assert redrawn[0] == plain[0] and redrawn[2] != plain[2], "another adapter"


def test_an_adapter_s_dropout_begins_once_b_is_not_zero(plain, trained):
    dropped = losses(trained("adapter.dropout=0.5"))
    assert dropped[0] == plain[0] and abs(dropped[2] - plain[2]) > 1e-3


def test_a_resume_drops_what_the_whole_training_drops(configure, ranks, base, work):
    base("llama")
    keys = ["train.steps=4", "checkpoint.save_every=2", "model.dropout=0.3", "adapter.dropout=0.3"]
    whole = ranks("train", configure("llama", f"paths.output={work}/dropped", *keys))
    cut = configure("llama", f"paths.output={work}/dropped-killed", *keys)
    assert ranks("train", cut, kill_at=3).code == -9
    resumed = ranks("train", cut)
    assert resumed.code == 0, resumed.output
    found = [[line["lm_loss"] for line in one.metrics if line["kind"] == "train"] for one in (whole, resumed)]
    assert len(found[0]) == 4 and found[0] == found[1]


def test_rslora_scales_by_the_root_of_the_rank(trained):
    rooted = trained("adapter.rank=16", "adapter.alpha=4", "adapter.rslora=true")
    assert losses(rooted) == losses(trained("adapter.rank=16", "adapter.alpha=16"))


def test_b_has_a_rate_of_its_own(trained):
    """In the first step A has no gradient, as B is zero: only B moves, by as much as at the higher rate."""
    plus = losses(trained("adapter.b_lr_ratio=4", "optimizer.lr=1e-3", "optimizer.weight_decay=0"))
    higher = losses(trained("optimizer.lr=4e-3", "optimizer.weight_decay=0"))
    assert plus[:2] == higher[:2] and plus[2] != higher[2]


def test_chosen_weights_have_no_decay_and_a_name_of_none_is_refused(trained):
    decayed = losses(trained("optimizer.weight_decay=9"))
    exempt = losses(trained("optimizer.weight_decay=9", "optimizer.without_decay=['*.adapter.*']"))
    assert exempt == losses(trained("optimizer.weight_decay=0")) != decayed
    (refused,) = trained("optimizer.without_decay=['*.adaptor.*']").values()
    assert "optimizer.without_decay: '*.adaptor.*' matches no weight" in refused["refused"]


def test_the_z_losses_of_tokens_and_of_routers_are_told_by_names_of_their_own(configure, ranks, base, work):
    base("glm4-moe")
    weights = ["train.z_loss=0.01", "moe.z_loss_coeff=0.001", "train.steps=2"]
    result = ranks("train", configure("glm4-moe", f"paths.output={work}/both-z", *weights))
    assert result.code == 0, result.output
    first = next(line for line in result.metrics if line["kind"] == "train")
    assert first["z_loss"] > 4 * first["router_z_loss"] > 0, "there are more tokens than experts"


def test_every_second_checkpoint_has_its_adapter_beside_it_also_after_a_kill(configure, ranks, base, work):
    base("llama")
    keys = ["train.steps=4", "checkpoint.save_every=1", "export.every=2", "export.formats=[adapter]"]
    run = configure("llama", f"paths.output={work}/as-made", f"paths.export={work}/as-made-export", *keys)
    assert ranks("train", run, kill_at=2).code == -9  # which leaves an odd number of checkpoints
    result = ranks("train", run)
    assert result.code == 0, result.output
    steps = sorted(path.parent.name for path in (work / "as-made" / "checkpoints").glob("iter_*/adapter"))
    assert steps == ["iter_0000002", "iter_0000004"]
    assert ranks("export", run).code == 0
    found = [work / "as-made" / "checkpoints" / "iter_0000004" / "adapter", work / "as-made-export" / "adapter"]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (found[0] / name).read_bytes() == (found[1] / name).read_bytes()
