"""conf/planner/serving/: what vLLM takes of a GPU, the layout that is chosen, what is said where none fits."""

from dataclasses import replace

import pytest

from conf.load import load
from conf.planner import parameters
from conf.planner.hardware import GPUS
from conf.planner.serving.duration import duration
from conf.planner.serving.layout import Serving, choose, is_eager, of, refusal, unsupported, with_layout
from conf.planner.serving.memory import MATRICES, Way, layers_of, memory, tokens_of_a_step
from conf.rules.packed_base import FORMATS, PARTS, part_of
from tests.support.known_models import known

H100, H200, B200, A100 = (GPUS[name] for name in ("h100", "h200", "b200", "a100"))


@pytest.mark.parametrize(
    "name, way, gigabytes, token",
    [  # bytes of a token in the cache, as vLLM's own formulas have them
        ("glm47", Way(8), 88.3, 47_104),
        ("glm47", Way(8, quantized=True), 44.5, 47_104),
        ("glm47", Way(8, 2), 45.5, 23_552),
        ("qwen3-235b", Way(8), 59.0, 48_128),
        ("llama31-405b", Way(8), 101.5, 64_512),
        ("llama31-405b", Way(8, quantized=True), 51.3, 64_512),
        ("deepseek-v3", Way(8, quantized=True), 85.5, 70_272),
        ("deepseek-v3", Way(8, 3), 61.1, 24_192),
    ],
)
def test_weights_and_cache_of_released_models(name, way, gigabytes, token):
    found = memory(known(name), way, H100)
    assert found.weights == pytest.approx(gigabytes * 1e9, rel=0.002)
    assert found.token == token


@pytest.mark.parametrize("name", ["glm47", "qwen3-235b", "llama31-70b", "mixtral-8x7b"])
def test_one_gpu_holds_all_parameters_but_those_of_multi_token_prediction(name):
    facts = replace(known(name), mtp_layers=0)
    assert memory(facts, Way(1), H100).weights == pytest.approx(2 * parameters.total(facts), rel=1e-4)


@pytest.mark.parametrize("packed", [("experts",), ("attention", "dense"), PARTS])
def test_codes_take_the_bytes_of_their_format(packed):
    facts, form = replace(known("glm45-air"), mtp_layers=0), FORMATS["int4"]
    plain, found = (memory(facts, way, H100).weights for way in (Way(1), Way(1, codes=form, packed=packed)))
    counts = [parameters.parts(facts, kind) for kind in facts.kinds]
    kinds = [kind for kind in MATRICES if part_of(kind) in packed]
    numbers = sum(of_layer.get(kind, 0) for of_layer in counts for kind in kinds)
    assert plain - found == pytest.approx(numbers * (2 - form.bytes), rel=1e-9)


def test_a_model_that_does_not_fit_in_bf16_is_served_as_codes():
    run = load("glm45-air-1xh100", ["convert.to=packed", "evaluate.adapter=packed"])
    assert refusal(run, known("glm45-air"), H100) == ""
    assert "are missing" in refusal(run.changed(evaluate={"adapter": "unmerged"}), known("glm45-air"), H100)


def test_a_qwen3_moe_as_an_h200_has_served_it():
    """Measured by benchmarks/gpu/whole_flow.py: 10.3 GiB with its weights loaded, then all of vLLM's share; 63 s."""
    sizes = dict(layers=15, hidden=2048, ffn=0, expert_ffn=768, heads=32, kv_heads=4, head_dim=128, experts=64, top_k=8)
    facts = replace(known("qwen3-235b"), vocab=512, **sizes)
    found = memory(facts, Way(1), H200)
    assert (found.weights + found.context) / 2**30 == pytest.approx(10.3, rel=0.03)
    assert found.taken == int(H200.memory * 0.9)
    run = load("qwen3-235b", ["evaluate.rows=20", "evaluate.max_tokens=8", "evaluate.eager=false"])
    serving = of(run, facts, H200, 1)
    assert duration(run, facts, H200, serving) == pytest.approx(63, rel=0.15)


def test_layers_of_stages_are_vllm_s():
    """vllm.distributed.utils.get_pp_indices: what is left over goes to the last but one, and to those before it."""
    assert [end - first for first, end in (layers_of(stage, 61, 4) for stage in range(4))] == [15, 15, 16, 15]
    assert [layers_of(stage, 5, 3) for stage in range(3)] == [(0, 2), (2, 4), (4, 5)]


def test_keys_of_fewer_heads_than_gpus_are_repeated():
    facts = known("glm47")
    assert memory(facts, Way(16), H100).token == memory(facts, Way(8), H100).token


def test_log_probabilities_of_prompts_have_a_bound():
    for name, most in (("glm47", 2048), ("llama31-70b", 2048), ("mixtral-8x7b", 8192)):
        assert tokens_of_a_step(known(name), 2, 256) == most
    assert tokens_of_a_step(replace(known("glm47"), vocab=10**7), 2, 256) == 256


def test_an_adapter_is_cut_as_its_model_is():
    run, facts = load("glm47", ["adapter.rank=32"]), known("glm47")
    for way in (Way(8, adapter=run.adapter), Way(8, expert_parallel=True, adapter=run.adapter)):
        assert memory(facts, way, H100).adapters == pytest.approx(2.4e9, rel=0.1)
    assert memory(facts, Way(8), H100).adapters == 0


def test_experts_are_spread_where_they_cannot_be_cut():
    facts = replace(known("glm47"), expert_ffn=1540, shared_ffn=1536)
    assert chosen("glm47", facts=facts).way.expert_parallel and not chosen("glm47").way.expert_parallel


def chosen(name: str, *overrides: str, gpu=H100, facts=None) -> Serving:
    model = name if name != "deepseek-v3-64" else "deepseek-v3"
    return choose(load(name, overrides), facts or known(model), gpu)


def test_one_host_is_taken_where_one_does_and_then_the_fewest_gpus():
    assert (chosen("glm47").way.hosts, chosen("glm47").way.tp) == (2, 8)
    assert chosen("glm47", gpu=H200).way.hosts == 1
    assert (chosen("glm47", "evaluate.quantization=fp8").way.hosts, chosen("deepseek-v3-64").way.hosts) == (1, 3)
    few = chosen("llama31-70b", "evaluate.rows=9")
    assert few.way.tp == 4 and few.at_once == 9
    assert chosen("llama31-70b", "evaluate.rows=200").way.tp == 8  # 4 would answer 108 rows of 4352 tokens at once
    assert chosen("llama31-70b", "evaluate.gpus=4").way.tp == 4


def test_graphs_are_captured_where_many_tokens_are_asked_for():
    def eager(*overrides: str) -> bool:
        return is_eager(load("glm47", overrides).evaluate)

    assert eager("evaluate.rows=200", "evaluate.max_tokens=1024")
    assert not eager("evaluate.rows=200", "evaluate.max_tokens=2048")
    assert not eager("evaluate.rows=600", "evaluate.max_tokens=1024")  # more rows than vLLM computes at once
    assert not eager("evaluate.rows=null") and eager("evaluate.rows=null", "evaluate.eager=true")


def test_the_length_of_a_pack_does_not_decide_on_graphs():
    packed = chosen("qwen35-35b-1xh100", facts=known("qwen35-35b-a3b"))
    assert packed.at_once < 20  # packs of 16,384 tokens
    assert packed.way.eager


def test_what_is_chosen_is_what_could_have_been_written():
    run, facts = load("glm47"), known("glm47")
    written = with_layout(run, choose(run, facts, H100))
    assert (written.evaluate.nodes, written.evaluate.gpus, written.evaluate.expert_parallel) == (2, 8, False)
    assert written.evaluate.eager is True  # 200 answers of 1024 tokens
    assert choose(written, facts, H100) == choose(run, facts, H100)


@pytest.mark.parametrize(
    "name, overrides, gpu, says",
    [
        ("glm47", "evaluate.nodes=1", H100, "15.1 GB are missing. These fit: evaluate.nodes=null, or evaluate.quantiz"),
        ("glm47", "evaluate.nodes=1 evaluate.gpus=2 evaluate.quantization=fp8", H100, "These fit: evaluate.gpus=null"),
        ("glm47", "evaluate.nodes=1", A100, "15.1 GB are missing. These fit: evaluate.nodes=null"),
        ("glm47", "layout=auto layout.nodes=1", H100, "15.1 GB are missing. These fit: evaluate.quantization=fp8"),
        (
            "llama31-405b",
            "layout=auto layout.nodes=1",
            A100,
            "28.4 GB are missing. It takes 2 hosts of 8: 50.7 GB of weights",
        ),
    ],
)
def test_what_fits_nowhere_is_refused_with_keys_that_mend_it(name, overrides, gpu, says):
    overrides = overrides.replace("layout=auto", "layout.auto=true").split()
    run = load(name, overrides, illegal=True)
    line = refusal(run, known(name), gpu)
    assert says in line and "\n" not in line
    for key in [word for word in line.partition("These fit: ")[2].split(", or ")[0].split() if "=" in word]:
        overrides = [one for one in overrides if not one.startswith(key.partition("=")[0])] + [key]
    if "These fit" in line:
        assert refusal(load(name, overrides, illegal=True), known(name), gpu) == ""


def test_a_gpu_without_fp8_is_named():
    run = load("glm47", ["evaluate.quantization=fp8"])
    assert unsupported(run, A100) == ["evaluate.quantization is fp8, which a100 does not support; null"]
    assert unsupported(run, H100) == [] == unsupported(load("glm47"), A100)


def test_what_fits_is_not_refused():
    assert refusal(load("glm47"), known("glm47"), H100) == "" == refusal(load("glm47-b200"), known("glm47"), B200)
