"""When a comparison with training is due, and what it finds: made of invented log-probabilities, without a model."""

import json
import random

import pytest

from conf.load import load
from contract.faults import Fault
from trainer.serving import agreement

BOUND = agreement.BOUNDS["bf16"]


def invented(tokens: int = 400, effect: float = 0.8, prompts: int = 8) -> dict:
    """A record as training writes it, of an adapter whose effect on a token is so large on average."""
    draw = random.Random(7)
    rows = []
    for number in range(prompts):
        base = [-draw.expovariate(0.2) for _ in range(tokens // prompts)]
        trained = [value + draw.gauss(0, effect * 1.25) for value in base]
        rows.append({"prompt": f"prompt {number}", "tokens": list(range(len(base) + 1))})
        rows[-1] |= {"log_probs": trained, "base_log_probs": base}
    return {"step": 6, "weights": "w" * 64, "rows": rows}


def served(record: dict, lost: float = 0.0, noise: float = 0.015, outliers: int = 2) -> list[list[float]]:
    """What a server says whose weights lack so much of the adapter's effect, and are rounded."""
    draw = random.Random(8)
    found = [
        [one - lost * (one - base) + draw.gauss(0, noise) for one, base in zip(*pair, strict=True)]
        for pair in ((row["log_probs"], row["base_log_probs"]) for row in record["rows"])
    ]
    for _ in range(outliers):  # tokens that rounding sends to another expert
        draw.choice(found)[draw.randrange(20)] += draw.choice((-1, 1)) * 1.3
    return found


def test_rounding_passes_and_what_was_compared_is_said():
    record = invented()
    parity = agreement.judge(record, served(record), BOUND)
    assert parity["ok"] and abs(parity["lost"]["share"]) < 0.003
    said = agreement.summary(parity, "")
    assert said.startswith("parity: 8 prompts of 400 tokens, served and as trained to step 6: 0.0")
    assert "(bound 0.05)" in said and "of the adapter's effect of 0.79" in said and "lost (bound 1%)" in said


@pytest.mark.parametrize("effect", [0.1, 0.8, 3.0])
def test_a_lost_part_of_the_adapter_shows_where_the_mean_is_within_its_bound(effect):
    record = invented(effect=effect)
    share = max(0.03, 0.012 / effect)
    parity = agreement.judge(record, served(record, lost=share), BOUND)
    assert parity["mean"] < BOUND or effect == 3.0
    assert parity["lost"]["share"] == pytest.approx(share, rel=0.3)
    with pytest.raises(
        Fault, match=r"the served model is not the trained one of step 6: .*% .* of the adapter's effect is lost"
    ):
        agreement.require(parity)


@pytest.mark.parametrize("effect", [0.001, 0.01, 0.05, 0.8, 3.0])
def test_rounding_alone_is_never_taken_for_a_loss_however_small_the_effect(effect):
    for noise in (0.001, 0.015, 0.04):
        record = invented(effect=effect)
        assert agreement.judge(record, served(record, noise=noise, outliers=1), BOUND)["faults"] == []


def test_the_base_itself_is_not_taken_for_a_model_that_training_changed_little():
    record = invented(effect=0.03)
    parity = agreement.judge(record, served(record, lost=1.0, noise=0.01), BOUND)
    assert parity["mean"] < BOUND and not parity["ok"]
    assert parity["lost"]["share"] == pytest.approx(1.0, abs=0.1)


def test_a_single_prompt_that_is_answered_otherwise_is_named():
    record = invented()
    found = served(record)
    found[3] = [value + 0.3 for value in found[3]]
    with pytest.raises(
        Fault, match=r"those of one prompt differ by 0.3.* nats per token, the bound is 0.2; .*'prompt 3'"
    ):
        agreement.require(agreement.judge(record, found, BOUND))


def test_numbers_that_are_none_do_not_agree():
    record = invented()
    found = served(record)
    found[5][0] = float("nan")
    assert not agreement.judge(record, found, BOUND)["ok"]


def test_without_an_adapter_s_effect_that_is_said():
    record = invented()
    for row in record["rows"]:
        del row["base_log_probs"]
    parity = agreement.judge(record, [row["log_probs"] for row in record["rows"]], BOUND)
    assert parity["ok"] and "the effect of an adapter was not recorded" in agreement.summary(parity, "")


def test_rounded_weights_are_held_to_their_rounded_base():
    record, bound = invented(), agreement.BOUNDS["fp8"]
    of_base, tuned = served(record, lost=1.0, noise=0.15), served(record, noise=0.15)
    parity = agreement.judge(record, tuned, bound, of_base)
    assert parity["ok"] and bound < parity["mean"] < parity["bound"] < parity["base"] / 3
    assert agreement.judge(record, tuned, bound)["ok"] is False  # by itself it is too far away
    assert "; the rounded base differs by 0.788 nats" in agreement.summary(parity, "")
    for lost in (1.0, 0.5, 0.3):
        assert not agreement.judge(record, served(record, lost=lost, noise=0.15), bound, of_base)["ok"], lost


def test_an_adapter_that_does_little_is_held_to_the_bound():
    record, bound = invented(effect=0.05), agreement.BOUNDS["fp8"]
    of_base = served(record, lost=1.0, noise=0.02)
    assert agreement.judge(record, served(record, noise=0.02), bound, of_base)["bound"] == bound


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (None, r"no such file; the base's evaluation with evaluate\.quantization=fp8 writes it"),
        ("{", "not of these prompts"),
        ({"quantization": "fp8", "rows": []}, "not of these prompts"),
        ({"quantization": "fp8", "rows": [{"tokens": [1, 2, 3], "log_probs": [-1.0]}]}, "was served with quantization"),
        (
            {"quantization": None, "rows": [{"tokens": [1, 2, 3], "log_probs": [-1.0, -2.0]}]},
            "was served with quantization",
        ),
    ],
)
def test_a_base_that_says_nothing_of_the_prompts_is_a_fault(record, fault, tmp_path):
    run = load("tiny", [f"paths.of_base={tmp_path}", "evaluate.quantization=fp8", "evaluate.precision=bf16"])
    if record is not None:
        (tmp_path / agreement.RECORD).write_text(record if isinstance(record, str) else json.dumps(record))
    with pytest.raises(Fault, match=rf"^paths\.of_base: .*{fault}"):
        agreement.read_base(run, [[1, 2, 3]])


def test_what_a_base_says_is_found_by_its_tokens(tmp_path):
    run = load("tiny", [f"paths.of_base={tmp_path}", "evaluate.quantization=fp8", "evaluate.precision=bf16"])
    rows = [{"tokens": [4, 5], "log_probs": [-3.0]}, {"tokens": [1, 2, 3], "log_probs": [-1.0, -2.0]}]
    (tmp_path / agreement.RECORD).write_text(json.dumps({"quantization": "fp8", "rows": rows}))
    assert agreement.read_base(run, [[1, 2, 3], [4, 5]]) == [[-1.0, -2.0], [-3.0]]


@pytest.fixture
def due(tmp_path):
    """due(mark, record, *overrides) -> what is expected of a served folder with that mark, and that record."""

    def due(mark: dict | None, record: dict | str | None, *overrides: str):
        (tmp_path / "export/merged").mkdir(parents=True, exist_ok=True)
        if mark is not None:
            (tmp_path / "export/complete.json").write_text(json.dumps({"step": 6, "formats": ["merged"], **mark}))
        if record is not None:
            text = record if isinstance(record, str) else json.dumps(record)
            (tmp_path / "parity.json").write_text(text)
        paths = [f"paths.served={tmp_path}/export/merged", f"paths.parity={tmp_path}/parity.json"]
        return agreement.expected(load("tiny", [*paths, *overrides]))

    return due


TRAINED = {"trained": {"weights": "w" * 64, "prompts": 8}}


def test_the_record_of_the_weights_that_are_served_is_compared(due):
    record, why = due(TRAINED, invented())
    assert record["step"] == 6 and why == ""


def test_exports_and_records_from_before_digests_are_compared(due):
    old = {key: value for key, value in invented().items() if key != "weights"}
    assert due({}, invented())[0] and due(TRAINED, old)[0]


@pytest.mark.parametrize(
    ("mark", "overrides", "why"),
    [
        (None, (), "is not marked as trained, and .*parity.json does not exist"),
        ({}, (), "is not marked as trained"),
        ({"trained": {"weights": "w", "prompts": 0}}, (), "training had no prompts"),
        (TRAINED, ("evaluate.parity_rows=0",), "evaluate.parity_rows is 0"),
    ],
)
def test_why_nothing_is_compared_is_said(mark, overrides, why, due):
    import re

    record, said = due(mark, None, *overrides)
    assert record is None
    assert re.search(why, agreement.summary(None, said))


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (None, "no such file; .*merged was trained to step 6, and training wrote its log-probabilities of 8 prompts"),
        ("", "not written by trainer.train"),
        ('{"rows": []}', "not written by trainer.train .*step"),
        ('[{"step": 6}]', "not written by trainer.train"),
        ('{"step": 6, "rows": [{}]}', "not written by trainer.train .*log_probs"),
        ('{"step": 6, "rows": []}', "has no tokens to compare"),
        ({**invented(), "step": 3}, "was written at step 3 of a training, but .* has other weights, of step 6"),
        ({**invented(), "weights": "v" * 64}, "was written at step 6 of a training, but .* has other weights"),
    ],
)
def test_a_record_that_is_due_and_missing_unreadable_or_of_other_weights_is_a_fault(record, fault, due):
    with pytest.raises(Fault, match=f"paths.parity: .*parity.json: {fault}"):
        due(TRAINED, record)


def test_the_loss_of_quantization_is_that_of_the_answers_and_has_a_limit():
    record = invented()
    for row in record["rows"]:
        row["prompt_tokens"] = 11
    log_probs = [[one - (0.25 if i >= 10 else 3) for i, one in enumerate(row["log_probs"])] for row in record["rows"]]
    rounded = agreement.rounding_loss(record["rows"], log_probs)
    assert rounded["loss"] == pytest.approx(0.25) and rounded["tokens"] == 320 and rounded["error"] < 1e-6
    parity = {"rounded": rounded | {"may_be": 0.3}}
    agreement.require_small_loss(parity, "int4")
    agreement.require_small_loss({"rounded": rounded | {"may_be": None}}, "int4")
    with pytest.raises(Fault, match=r"export.max_loss: 0.2, but export.quantization int4 makes held-out answers 0.25"):
        agreement.require_small_loss({"rounded": rounded | {"may_be": 0.2}}, "int4")
    with pytest.raises(Fault, match="less likely than in training; the exported files are kept"):
        agreement.require_small_loss({"rounded": rounded | {"loss": float("nan"), "may_be": 0.2}}, "int4")
