"""flows/new/choices.py: values of a new configuration, chosen from what model, rows and hardware are like."""

from pathlib import Path

import pytest

from conf import families, noise
from conf.model_facts import facts_from_hf
from conf.planner import hardware
from conf.rules import schedule
from conf.rules.contradictions import contradictions
from contract.faults import Fault
from contract.first_rows import FirstRows
from flows.new import choices
from flows.new.choices import choose, global_batch, held_out, lengths, rate
from flows.new.machine import Machine, parse
from flows.new.model import Model
from flows.new.planned import as_run
from tests.support.known_models import known

PLACES = [number / 300 for number in range(300)]
TICKETS = FirstRows(
    kind="pairs",
    reason="ticket -> input, team -> output: from the configuration",
    columns={"input": "ticket", "output": "team"},
    rows=300,
    whole=True,
    read=300,
    tokens=[30, 40, 50] * 100,
    answers=[3, 4, 5] * 100,
    places=PLACES,
    template="chat",
)
GIVEN = {"data.source": "/rows.csv"}


def rows(**changed) -> FirstRows:
    return FirstRows(**(vars(TICKETS) | changed))


def model(name: str = "tiny-qwen3-moe", **config) -> Model:
    tiny = families.tiny().get(name.removeprefix("tiny-"))
    facts = facts_from_hf(tiny) if tiny else known(name)
    return Model(f"org/{name}", {"max_position_embeddings": 4096} | config, facts, Path("none"))


def made(rows: FirstRows = TICKETS, on: Machine | None = None, name: str = "tiny-qwen3-moe", **given):
    keys = {key.replace("__", "."): value for key, value in given.items()}
    found = choose("mine", model(name), rows, on or parse("cpu", why="no GPU"), GIVEN | keys)
    run = as_run(found)
    assert list(contradictions(run)) == []
    assert all(choice.why for choice in found.made.values())
    return schedule.resolved(run, found.sequences), found.made


def test_few_short_rows_on_a_cpu():
    run, why = made()
    assert (run.data.seq_length, run.data.packed, run.train.global_batch) == (64, False, 8)
    assert run.train.steps == 225 and run.optimizer.warmup_steps == 12
    assert (run.train.precision, run.hardware.gpu, run.promote.metric) == ("fp32", "cpu", "held_out/exact_match")
    assert (run.train.validate_every, run.train.validate_batches, run.checkpoint.save_every) == (23, 1, 45)
    assert run.adapter.init == "kaiming" and "PEFT" in why["adapter.init"].why
    assert why["train.epochs"] == choices.Choice(8, "times that each row is seen; 225 sequences, 225 steps")


def test_many_rows_share_sequences_on_gpus():
    many = rows(rows=50_000, whole=False, tokens=[200, 400, 600] * 100, answers=[100, 200, 300] * 100, places=[])
    run, why = made(many, parse("8xh100"), "qwen3-235b")
    assert (run.data.seq_length, run.data.packed, run.train.global_batch) == (4096, True, 32)
    assert why["data.packed"].why == "10 rows share a sequence, and no GPU computes padding"
    assert (run.adapter.experts, run.optimizer.lr, run.train.precision) == ("shared", 1e-4, "bf16")
    assert run.promote.metric == "held_out/log_likelihood" and run.evaluate.max_tokens == 376
    assert run.train.steps == pytest.approx(50_000 * 0.97 / 10.24 / 32, rel=0.1)
    assert run.train.validate_batches >= 1 and run.data.validation * 50_000 / 10.24 > 32


def test_what_is_asked_for_stays_and_the_rest_follows_from_it():
    run, why = made(train__global_batch=4, adapter__kind="none", optimizer__beta2=0.99, data__seq_length=128)
    assert run.train.steps == 237 and run.data.seq_length == 128 and run.optimizer.beta2 == 0.99
    assert run.optimizer.lr == 2e-3 and "adapter.rank" not in why
    assert why["train.global_batch"].why == why["optimizer.beta2"].why == "as asked"


def test_steps_and_warm_up_may_be_asked_for_by_number():
    run, why = made(train__steps=40, optimizer__warmup_steps=3)
    assert (run.train.steps, run.optimizer.warmup_steps, run.train.validate_every) == (40, 3, 4)
    assert not {"train.epochs", "optimizer.warmup"} & {*why}


def test_texts_are_not_evaluated():
    run, _ = made(rows(kind="text", tokens=[3000] * 10, answers=[3000] * 10, places=[], template="text"))
    assert run.evaluate.tasks == () and run.data.test == 0 and not run.data.packed
    assert run.train.steps == pytest.approx(300 * 3000 / 512 / run.train.global_batch, rel=0.1)


def test_several_hosts_have_an_engine():
    assert made(on=parse("2x8xh200"))[0].gang.engine == "prefect"


def test_rows_that_cannot_be_used_are_dropped_and_named():
    run, why = made(rows(bad=3, bad_sample="team: empty answer"))
    assert run.data.bad_rows == "drop" and "3 of the first 300 rows" in why["data.bad_rows"].why
    assert "team: empty answer" in why["data.bad_rows"].why


@pytest.mark.parametrize(
    "changed, complaint",
    [
        ({"rows": 7, "read": 7}, "7 rows; 20 or more can be split"),
        ({"bad": 100, "bad_sample": "x: empty"}, "100 of the first 300 rows cannot be used: x: empty"),
    ],
)
def test_rows_of_which_nothing_can_be_learned(changed, complaint):
    with pytest.raises(Fault, match=complaint):
        made(rows(**changed))


def test_rows_that_nobody_has_counted():
    _, why = made(rows(rows=None, whole=False, places=[]))
    assert "taken as 10,000" in why["train.epochs"].why and "not counted" in why["data.source"].why


@pytest.mark.parametrize(
    "tokens, most, length",
    [([10, 60], 8192, 64), ([700], 8192, 768), ([5000], 8192, 5120), ([100, 9000], 4096, 4096)],
)
def test_a_sequence_holds_the_longest_row_up_to_what_the_model_knows(tokens, most, length):
    found = lengths(rows(tokens=tokens, read=len(tokens)), 300, most, False, {})
    assert found.seq_length == length
    assert ("left out" in found.why) == (max(tokens) > most)


def test_rows_that_were_not_read_may_be_longer():
    assert lengths(rows(tokens=[60], whole=False), 5_000, 8192, False, {}).seq_length == 128


@pytest.mark.parametrize(
    "sequences, gpus, batch",
    [(20, 1, 4), (270, 1, 8), (1_000, 1, 16), (50_000, 1, 32), (50_000, 64, 64), (270, 3, 9), (100, 64, 8)],
)
def test_a_batch_leaves_steps_enough_and_feeds_each_gpu_where_it_can(sequences, gpus, batch):
    assert global_batch(sequences, gpus) == batch


def test_what_is_held_out_is_counted_where_the_places_are_known():
    assert held_out(PLACES, 300, 10, 0.0) == 0.05
    assert held_out(PLACES, 300, 16, 0.05) == 0.1
    assert held_out(PLACES, 300, 100, 0.0) is None
    assert held_out([], 300, 10, 0.0) == 0.1
    assert held_out([], 1_000_000, 200, 0.0) == 0.01


def test_larger_models_take_smaller_steps():
    sizes = (10**6, 10**8, 10**9, 8 * 10**9, 70 * 10**9)
    for kind in ("lora", "none"):
        rates = [rate(kind, size) for size in sizes]
        assert rates == sorted(rates, reverse=True)
    assert rate("lora", 8 * 10**9) == rate("dora", 8 * 10**9) == 20 * rate("none", 8 * 10**9)


def test_without_evaluation_nothing_is_left_of_it():
    found = choose("mine", model(), TICKETS, parse("cpu", why="no GPU"), GIVEN)
    choices.without_evaluation(found, "heads of 24")
    assert as_run(found).evaluate.tasks == () and "promote.metric" not in found.made


def test_a_cpu_is_this_host():
    assert parse("cpu").gpu.memory == hardware.read("cpu").memory


@pytest.mark.parametrize(
    ("count", "share", "held"), [(20, 0.25, 5), (100, 0.2, 20), (300, 0.2, 60), (600, 0.1, 60), (10_000, 0.02, 200)]
)
def test_enough_rows_are_held_back_to_show_a_gain(count, share, held):
    run, _ = made(rows(rows=count, read=count, places=[number / count for number in range(count)]))
    assert (run.data.test, round(run.data.test * count)) == (share, held)
    assert noise.warning(run, held) == "" or held == count // 5 or count < 25


def test_a_small_model_takes_steps_enough_on_few_rows_and_a_large_one_three_epochs():
    assert [made(rows(rows=count, places=[]))[1]["train.epochs"].value for count in (100, 300, 600, 3_000)] == [
        10,
        9,
        4,
        2,
    ]
    assert made(on=parse("8xh100"), name="qwen3-235b")[1]["train.epochs"].value == 3
    assert made(train__epochs=2)[1]["train.epochs"].value == 2
