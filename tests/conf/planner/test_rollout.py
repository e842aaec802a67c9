"""conf/planner/serving/rollout.py: memory that vLLM and training have in turn, and what mends a lack of it."""

from dataclasses import replace

import pytest

from conf.load import load
from conf.planner import display
from conf.planner.hardware import CPU, GB, GPUS
from conf.planner.memory import memory
from conf.planner.serving import rollout
from conf.planner.serving.memory import UTILIZATION
from conf.planner.verdict import facts_of, plan
from conf.rules.gpus import takes
from conf.rules.reinforcement import as_training

H200, H100 = GPUS["h200"], GPUS["h100"]
LORA, FULL, AIR = "qwen3-30b-a3b-1xh200", "qwen3-30b-a3b-full-8xh200", "glm45-air-8xh200"


def of(name: str, *overrides: str):
    run = load(name, ["reinforce.steps=10", *overrides])
    return run, facts_of(run)


def test_vllm_and_training_fit_into_the_gpu_together_and_the_cache_gets_no_more_than_it_needs():
    run, facts = of(LORA)
    found = rollout.of(run, facts, H200)
    assert found.lacks <= 0 and 1 <= found.at_once < found.way.sequences == 128
    assert found.taken + found.beside + rollout.BUCKETS == found.awake <= int(H200.memory * UTILIZATION)
    few = rollout.of(*of(LORA, "reinforce.prompts=1", "reinforce.samples=2"), H200)
    assert few.cache == 2 * few.of_a_row < found.cache and few.at_once == 2


def test_seconds_of_each_phase_follow_from_what_it_does():
    run, facts = of(LORA)
    one = rollout.of(run, facts, H200).seconds
    more = rollout.of(*of(LORA, "reinforce.max_tokens=512", "reinforce.updates=2"), H200).seconds
    alone = rollout.of(
        *of(LORA, "reinforce.transport=adapter", "adapter.targets=[linear_qkv,linear_proj]"), H200
    ).seconds
    assert one and more and alone
    assert one.step == pytest.approx(one.transfer + one.probe + one.generate + one.train)
    assert more.generate == pytest.approx(2 * one.generate) and more.transfer == one.transfer
    assert alone.transfer == 0 < one.transfer


def test_what_cannot_answer_is_refused_with_keys_that_mend_it():
    run, facts = of(FULL)
    refused = rollout.unanswered(run, facts, H200)
    assert "are missing for one answer. These fit: optimizer.offload=1, or adapter.kind=lora" in refused
    assert "\n" not in refused and rollout.of(run, facts, H200).lacks > 0
    for mend in (one.split() for one in refused.partition("These fit: ")[2].split(", or ")):
        gpu = GPUS[mend[0].partition("=")[2]] if mend[0].startswith("hardware") else H200
        assert rollout.unanswered(*of(FULL, *mend), gpu) == ""


def test_on_gpus_of_their_own_engines_have_all_of_each_and_share_the_prompts():
    shared, own = rollout.of(*of(LORA), H200), rollout.of(*of(LORA, "reinforce.engine_gpus=1"), H200)
    assert own.beside == 0 < shared.beside and own.at_once > shared.at_once
    two = rollout.of(*of(LORA, "reinforce.engine_gpus=1", "reinforce.engines=2"), H200)
    assert own.seconds and two.seconds
    assert two.seconds.transfer == pytest.approx(2 * own.seconds.transfer)  # one after another
    assert two.seconds.generate < own.seconds.generate and two.seconds.train == own.seconds.train


def test_beside_training_a_step_takes_as_long_as_the_longer_of_both():
    keys = ("reinforce.engine_gpus=1", "reinforce.engines=3")
    turns = rollout.of(*of(LORA, *keys), H200).seconds
    beside = rollout.of(*of(LORA, *keys, "reinforce.staleness=1"), H200).seconds
    assert turns and beside and beside.phases == turns.phases
    assert turns.step - beside.step == pytest.approx(min(turns.generate, turns.train))


def test_the_plan_counts_gpus_of_vllm_and_says_what_is_on_them():
    planned = plan(*of(LORA, "reinforce.engine_gpus=1", "reinforce.engines=3", "reinforce.staleness=1"), H200)
    one = plan(*of(LORA, "reinforce.engine_gpus=1"), H200)
    (need,) = [need for need in planned.needs if need.stage == "reinforce"]
    (less,) = [need for need in one.needs if need.stage == "reinforce"]
    assert (need.gpus, less.gpus) == (4, 2) and need.memory > less.memory
    assert need.cost and less.cost and need.seconds and less.seconds
    assert need.cost / need.seconds == pytest.approx(2 * less.cost / less.seconds)
    text = "\n".join(display.lines(planned))
    assert "\nanswers  vLLM on 3 separate h200, each: " in text and "generate during train" in text
    assert "while it sleeps" not in text
    assert display.as_dict(planned)["reinforce"]["gpus"] == 3


def test_a_model_that_no_gpu_holds_says_so():
    run, facts = of(LORA, "model.source=deepseek-v3", "layout.auto=true")
    assert rollout.unanswered(run, facts, H100).endswith(". 8 GPUs are not enough either")


def test_an_engine_on_several_gpus_has_a_part_of_weights_and_cache_on_each():
    one = rollout.of(*of(LORA, "reinforce.engine_gpus=1"), H200)
    two = rollout.of(*of(LORA, "reinforce.engine_gpus=2"), H200)
    assert two.memory.weights == pytest.approx(one.memory.weights / 2, rel=0.01)
    assert two.memory.token * 2 == one.memory.token and two.at_once >= one.at_once
    assert (one.gpus, two.gpus) == (1, 2) and one.seconds and two.seconds
    assert two.seconds.generate < one.seconds.generate and two.seconds.transfer == one.seconds.transfer
    planned = plan(*of(LORA, "reinforce.engine_gpus=2", "reinforce.engines=2"), H200)
    (need,) = [need for need in planned.needs if need.stage == "reinforce"]
    assert need.gpus == 5
    text = "\n".join(display.lines(planned))
    assert "\nanswers  vLLM on 4 separate h200, 2 engines, each on 2 GPUs, each GPU: 30.5 GB weights" in text


def test_engines_in_turn_with_training_are_on_its_gpus_and_a_lack_is_mended_by_more_of_them():
    refused = rollout.unanswered(*of(AIR), H200)
    mend, elsewhere, *_ = refused.partition("These fit: ")[2].split(", or ")
    assert mend == "reinforce.engine_gpus=4 reinforce.in_turn=true"
    assert elsewhere == "reinforce.engine_gpus=2 reinforce.hosts=1"
    tried = of(AIR, *mend.split())
    found = rollout.of(*tried, H200)
    assert rollout.unanswered(*tried, H200) == "" and found.lacks <= 0 and not found.alone and found.gpus == 0
    fewer = of(AIR, "reinforce.engine_gpus=2", "reinforce.in_turn=true")
    assert rollout.of(*fewer, H200).lacks > 0 and "each of 2 h200 has" in rollout.unanswered(*fewer, H200)
    assert takes(tried[0], "reinforce").gpus == 8
    assert "\nanswers  vLLM on the first 4 h200, each: " in "\n".join(display.lines(plan(*tried, H200)))


def test_hosts_of_training_have_the_first_one_wait_for_what_they_hold_of_the_weights():
    def planned(*keys: str):
        found = rollout.of(*of(FULL, "reinforce.engine_gpus=8", "reinforce.in_turn=true", *keys), H200)
        assert found.seconds
        return found, found.seconds.transfer

    (one, alone), (copies, beside) = planned(), planned("layout.nodes=2")
    (_, spread), (_, cut) = planned("layout.nodes=2", "layout.ep=16"), planned("layout.nodes=2", "layout.pp=2")
    assert beside == alone < spread < cut  # experts but not the rest, and half of all
    assert cut - alone == pytest.approx(30.5e9 / (50e9 * 0.8), rel=0.02)
    assert copies.beside < one.beside  # optimizer states are divided over both


def test_the_first_stage_alone_has_vllm_where_the_others_are_on_other_hosts():
    keys = ("reinforce.engine_gpus=8", "reinforce.in_turn=true", "layout.nodes=2", "layout.pp=2")
    run, facts = of(FULL, *keys, "layout.first_stage_layers=16")
    first, last = memory(as_training(run), facts, H200)
    found = rollout.of(run, facts, H200)
    assert found.trains == first.total < last.total and found.beside < last.weights + last.optimizer


def test_a_step_s_answers_count_in_the_memory_of_hosts_and_are_refused_where_a_cpu_has_less():
    def need(*keys: str):
        run, facts = of("tiny-rl", "data.seq_length=4096", "reinforce.max_tokens=4000", *keys)
        planned = plan(run, facts, replace(CPU, memory=16 * GB))
        (found,) = [one for one in planned.needs if one.stage == "reinforce"] or [None]
        return planned, found

    (fits, few), (_, more) = need("reinforce.prompts=16"), need("reinforce.prompts=160")
    assert few and more and not fits.unanswered
    assert more.memory - few.memory == pytest.approx(144 * 8 * 4000 * rollout.HELD, rel=0.1)
    refused, _ = need("reinforce.prompts=10000")
    assert refused.unanswered.startswith("10,000 prompts with 8 answers of 4000 tokens take 54.4 GB in the processes")


def test_a_model_that_an_engine_s_processes_do_not_divide_is_refused_on_a_cpu_too():
    refused = plan(*of("tiny-rl", "reinforce.engine_gpus=1000000000"), replace(CPU, memory=16 * GB))
    assert refused.unanswered == "reinforce.engine_gpus is 1000000000, which does not divide num_attention_heads, 4"


def test_the_plan_counts_hosts_of_training_and_of_vllm():
    planned = plan(*of(FULL, "layout.nodes=2", "reinforce.hosts=3", "reinforce.engine_gpus=8"), H200)
    (need,) = [one for one in planned.needs if one.stage == "reinforce"]
    assert (need.hosts, need.gpus) == (5, 8) and need.seconds and need.cost
    assert need.cost == pytest.approx(need.seconds / 3600 * 5 * 8 * 3.5)


def test_gpus_that_do_not_divide_the_model_are_refused_with_as_many_as_do():
    refused = rollout.unanswered(*of(AIR, "reinforce.engine_gpus=3", "reinforce.in_turn=true"), H200)
    assert refused.startswith(
        "reinforce.engine_gpus is 3, which does not divide moe_intermediate_size, 1408. These fit: "
    )
    assert "reinforce.engine_gpus=4 reinforce.in_turn=true" in refused


def test_more_gpus_than_a_host_has_are_refused_with_what_it_can_do():
    refused = rollout.unanswered(*of(AIR, "reinforce.engine_gpus=4"), H200)
    assert refused.startswith("vLLM needs 4 GPUs in addition to the 8 of training, but a host of h200 has 8. These")
    assert "reinforce.engine_gpus=4 reinforce.in_turn=true" in refused and "reinforce.hosts=1" in refused
    assert rollout.unanswered(*of(AIR, "reinforce.engine_gpus=4", "reinforce.hosts=1"), H200) == ""


def test_the_plan_has_a_row_and_lines_of_it():
    planned = plan(*of(LORA), H200)
    assert [need.stage for need in planned.needs][5:7] == ["reinforce", "export"]
    need = planned.needs[5]
    assert planned.rollout and planned.rollout.seconds
    assert need.gpu_memory == max(planned.rollout.awake, planned.rollout.trains)
    assert need.seconds and need.seconds > 10 * planned.rollout.seconds.step
    text = "\n".join(display.lines(planned))
    assert "\nanswers  vLLM on the first h200: 61.1 GB weights" in text and "\nphases   " in text
    assert display.as_dict(planned)["reinforce"]["seconds"]["generate"] > 0


def test_a_plan_without_it_says_nothing_of_it():
    run = load(LORA)
    planned = plan(run, facts_of(run), H200)
    assert planned.rollout is None and not planned.unanswered and display.as_dict(planned)["reinforce"] is None
    assert "reinforce" not in {need.stage for need in planned.needs}


def test_a_plan_that_cannot_answer_is_refused_and_a_batch_that_cannot_be_cut_is_illegal():
    refused = plan(*of(FULL), H200)
    assert refused.legal and refused.rollout is None
    assert [*display.lines(refused)][-1].startswith("also refused: reinforce: one h200 has")
    illegal = plan(*of(FULL, "reinforce.prompts=3", "reinforce.samples=3"), H200)
    assert not illegal.legal and "3 prompts with 3 answers each: train." in illegal.problems[0]
