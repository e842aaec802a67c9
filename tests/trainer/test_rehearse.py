"""trainer/rehearse.py: Megatron's models and verdicts against conf/planner/parameters.py and conf/rules/layout.py.

The models are built for real, on no memory: in one process that imports Megatron once
(tests/support/ranks/build_ranks.py).
"""

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import product
from typing import Any

import pytest

from conf.load import FOLDERS, load
from conf.model_facts import facts_from_hf
from conf.planner.verdict import config_of
from conf.rules.layout import problems
from tests.support import preloaded
from tests.support.drawn_models import MODELS, OTHERS, make_run, pair
from tests.support.known_models import known
from trainer import rehearse
from trainer.rehearsal import scaled_down
from trainer.rehearsal.tiny_models import KINDS

# Megatron builds these, and would add up gradients, or gather tokens, of ranks that have different ones.
STRICTER = re.compile(
    r"layout\.(etp: \d+, but dora cuts the adapters of experts|ep: \d+, but dora trains experts wrongly)"
)
DENSE = ("", "tp=2", "tp=2 sp=true", "tp=4 pp=2", "pp=4", "pp=2 vpp=2", "cp=2", "pp=2 first_stage_layers=1")
MOE = ("tp=2 sp=true ep=4", "tp=2 sp=true ep=2 etp=2", "pp=2 vpp=2 ep=2", "pp=2 last_stage_layers=1 ep=8", "etp=4")
ADAPTERS = (
    {"kind": "none"},
    {"rank": 8, "experts": "each"},
    {"rank": 8, "experts": "shared"},
    {"rank": 8, "kind": "dora", "targets": ["linear_qkv", "linear_q_up_proj", "linear_proj"]},
)


@pytest.fixture(scope="session")
def ask(tmp_path_factory):
    """ask(run, config) -> {"counts": {rank: {kind: count}}} or {"refused": Megatron's words}."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.ranks.build_ranks"]
    log, pipe = tmp_path_factory.mktemp("rehearse") / "log", subprocess.PIPE
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as server,
    ):

        def ask(run, config):
            server.stdin.write(json.dumps({"run": run.model_dump(mode="json"), "config": config}) + "\n")
            server.stdin.flush()
            line = server.stdout.readline()
            assert line, log.read_text()[-3000:]
            answer = json.loads(line)
            assert "failed" not in answer, answer["failed"]
            return answer

        yield ask
        server.stdin.close()


def cut(text: str) -> dict:
    keys = {key: json.loads(value) for key, value in (pair.split("=") for pair in text.split())}
    dense = keys.get("tp", 1) * keys.get("pp", 1) * keys.get("cp", 1)
    experts = keys.get("etp", 1) * keys.get("ep", 1) * keys.get("pp", 1)
    return {"gpus_per_node": max(dense, experts), **keys}


def differences(run, config, counts) -> list[str]:
    expected = rehearse.holdings(run, facts_from_hf(config))
    assert len(counts) == len(expected) == run.layout.pp
    return [
        f"rank {rank}: {kind} is {found.get(kind, 0)}, planned {want[kind]}"
        for (rank, found), want in zip(counts.items(), expected.values(), strict=True)
        for kind in rehearse.differences(Counter(found), want)
    ]


def compare_counts(ask, model: str, share: range) -> None:
    """Of those pairs of a layout and an adapter whose numbers add up to one that is in the share."""
    config = (KINDS | MODELS)[model] | ({"vocab_size": 512} if model == "llama" else {})
    text_model: Any = config.get("text_config", config)
    moe = "num_experts_per_tok" in text_model
    # experts need sp under tp
    layouts = [text for text in DENSE if "tp" not in text or "sp" in text] + list(MOE) if moe else DENSE
    if model == "gpt-oss":  # has biases in experts
        layouts = [text for text in layouts if "etp" not in text]
    if facts_from_hf(config).windows:
        layouts = [text for text in layouts if "cp" not in text]
    key_heads = text_model.get("linear_num_key_heads", 0)  # tp * cp divides those of gated delta nets
    layouts = [text for text in layouts if key_heads % (cut(text).get("tp", 1) * cut(text).get("cp", 1)) == 0]
    if (facts := facts_from_hf(config)).tied and facts.mtp_layers:  # conf/rules/model.py refuses several stages
        layouts = [text for text in layouts if "pp" not in cut(text)]
    for (first, text), (second, adapter) in product(enumerate(layouts), enumerate(ADAPTERS)):
        if first + second not in share:
            continue
        run = make_run(layout=cut(text), adapter=adapter, train={"global_batch": 16, "steps": 1})
        assert not problems(run, facts), (text, adapter)
        answer = ask(run, config)
        assert "counts" in answer, (text, adapter, answer)
        assert not differences(run, config, answer["counts"]), (text, adapter)


@pytest.mark.parametrize("model", MODELS)
def test_counts_are_megatrons(ask, model):
    """Every layout with one adapter; the next model has it with the next one."""
    compare_counts(ask, model, range([*MODELS].index(model) % len(ADAPTERS), 99, len(ADAPTERS)))


@pytest.mark.slow
@pytest.mark.parametrize("model", [*MODELS, *OTHERS])
def test_counts_of_every_layout_with_every_adapter_are_megatrons(ask, model):
    compare_counts(ask, model, range(99))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("glm47", marks=pytest.mark.slow),
        "deepseek-v3",
        pytest.param("llama31-405b", marks=pytest.mark.slow),
    ],
)
def test_counts_are_megatrons_at_full_size(ask, name):
    config = config_of(make_run(model={"source": SOURCES[name]}))[0]
    assert facts_from_hf(config) == known(name)
    layout = {"nodes": 16, "gpus_per_node": 8, "tp": 8, "pp": 2, "sp": True}
    layout |= {"ep": 8} if known(name).experts else {}
    layout |= {"first_stage_layers": 29} if name == "deepseek-v3" else {}
    run = make_run(layout=layout, adapter={"rank": 64}, train={"global_batch": 128, "steps": 1})
    assert not differences(run, config, ask(run, config)["counts"])


SOURCES = {
    "glm47": "zai-org/GLM-4.7",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3-0324",
    "llama31-405b": "meta-llama/Llama-3.1-405B-Instruct",
}


def verdicts(ask, seeds) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        config, run = pair(seed)
        ours = problems(run, facts_from_hf(config))
        answer = ask(run, config)
        refused = answer.get("refused")
        if refused:
            assert ours, f"seed {seed}: Megatron alone refuses: {refused}"
        elif ours:
            assert all(STRICTER.match(line) for line in ours), f"seed {seed}: Megatron builds it, but {ours}"
        else:
            assert not differences(run, config, answer["counts"]), f"seed {seed}"
        found["refused" if refused else "stricter" if ours else "built"] += 1
    return found


def test_verdicts_are_megatrons(ask):
    found = verdicts(ask, range(25))
    assert found["built"] > 5 and found["refused"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for folder in FOLDERS for path in folder.glob("*.yaml")))
def test_every_preset_is_as_megatron_builds_it(ask, name):
    run, _ = rehearse.plainly(load(name, illegal=True))
    config = config_of(run)[0]
    answer, ours = ask(run, config), problems(run, facts_from_hf(config))
    assert bool(ours) == ("refused" in answer), (ours, answer)
    assert ours or not differences(run, config, answer["counts"])


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
def test_shared_experts_are_computed_beside_the_others_only_where_core_allows_it(ask, dispatcher):
    """On a GPU; which a rehearsal on a CPU has to know of."""
    train = {"global_batch": 16, "steps": 1}
    train |= {"recompute": "selective", "recompute_modules": ["shared_experts"]} if dispatcher == "alltoall" else {}
    run = make_run(layout=cut("ep=2"), adapter={"kind": "none"}, moe={"dispatcher": dispatcher}, train=train)
    assert "counts" in ask(run, MODELS["glm4-moe"])


def test_recomputing_several_layers_of_which_one_is_mtp(ask):
    train = {"global_batch": 16, "steps": 1, "recompute": "full", "recompute_layers": 2}
    answer = ask(make_run(layout=cut("pp=2"), train=train), MODELS["glm4-moe-mtp"])
    assert answer["refused"] == "recompute_num_layers must be 1 for MTP recompute"


def test_the_padding_of_buffers_is_no_difference(ask):
    """With so many copies a rank's part of them is smaller than what lies between two parameters."""
    run = make_run(layout={"gpus_per_node": 94}, adapter={"rank": 3}, train={"global_batch": 94, "steps": 1})
    (found,) = ask(run, MODELS["llama"])["counts"].values()
    assert found["padding"] > 0 and not differences(run, MODELS["llama"], {0: found})
    assert found["gradients"] == 4 * found["trained_dense"]
    assert differences(run, MODELS["llama"], {0: found | {"optimizer": 2 * found["optimizer"] + 12 * found["padding"]}})


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_verdicts_are_megatrons(ask, hundred):
    found = verdicts(ask, range(100 * hundred, 100 * hundred + 100))
    assert found["built"] > 20 and found["refused"] > 20 and found["stricter"] < 5


@pytest.fixture(scope="module")
def command():
    """command(*arguments) -> code and output of python -m trainer.rehearse, in a fork that has Megatron's imports."""
    with preloaded.python("from trainer.rehearsal import meta_model; meta_model.prepare()") as fork:

        def command(*arguments: str) -> tuple[int, str]:
            done = fork("trainer.rehearse", *arguments)
            return done.code, done.output + done.errors

        yield command


@pytest.mark.slow
def test_command_on_a_model_of_many_gpus(command):
    cut = ("layout.pp=4", "layout.etp=1", "layout.nodes=8", "train.global_batch=64")
    code, text = command("glm47-as-documented", *cut, "train.fp8=blockwise", "optimizer.states=bf16")
    assert code == 0, text
    assert text.splitlines()[0] == "without train.fp8, optimizer.states"
    assert text.splitlines()[-1] == "equal: 4 of 64 ranks built and counted"
    assert "rank 48, stage 3: " in text and "planned" not in text


def test_command_says_what_megatron_refuses(command):
    code, text = command("glm47", "layout.pp=2", "layout.ep=4", "layout.vpp=3", "train.global_batch=32")
    assert code == 1, text
    assert text.startswith("refused by Megatron: ") and len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "override, line",
    [
        ("layout.tpp=2", "layout.tpp"),
        ("layout.nodes=-1", "layout.nodes: -1 is too small"),
        ("model.source=tiny://mine", "model.source: tiny://mine: unknown model; known are tiny://deepseek-v3, "),
        ("--steps=-1", "--steps: -1 is negative; 0 takes no steps"),
        ("model.source=me/mine", "model.source: me/mine: unknown model; known are "),
    ],
)
def test_command_refuses_in_one_line(command, override, line):
    code, text = command("glm47", override)
    assert code == 2 and len(text.splitlines()) == 1 and line in text, text


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut, line",
    [
        ("", "twin on 8 processes (tp 2 pp 1 cp 1 ep 4 etp 2 sp True): losses "),
        (
            "layout.pp=4 layout.vpp=23 layout.tp=1 layout.sp=false layout.ep=2 layout.etp=1 adapter.kind=none "
            "data.packed=true",
            "twin on 8 processes (tp 1 pp 2 vpp 2 cp 1 ep 2 etp 1 sp False): losses ",
        ),
    ],
)
def test_a_twin_takes_real_steps(command, cut, line):
    code, text = command(
        "glm47-as-documented", *cut.split(), "model.mtp=false", "train.global_batch=32", "--steps", "2"
    )
    assert code == 0, text
    assert text.startswith(line) and text.splitlines()[0].count(",") == 1


def test_megatron_accepts_micro_batches_of_several_packs(command):
    code, text = command("tiny", "data.packed=true", "train.micro_batch=4")
    assert code == 0 and text.splitlines()[-1].startswith("equal: "), text


PRESETS = ("llama31-70b", "llama31-405b", "glm47", "glm47-b200", "qwen3-235b", "deepseek-v3-64", "deepseek-v3-512")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_twin(command, name):
    code, text = command(name, "--steps", "2")
    assert code == 0, text
    assert text.startswith("twin on ") and text.splitlines()[-1].startswith("equal: ")


@pytest.mark.parametrize(
    "layout, scaled",
    [
        ({"tp": 8, "pp": 16, "cp": 4, "sp": True, "first_stage_layers": 3}, {"tp": 2, "pp": 2, "sp": True, "cp": 2}),
        ({"tp": 8, "ep": 64, "etp": 8, "sp": True}, {"tp": 2, "ep": 4, "etp": 2, "sp": True}),
        ({"pp": 4, "vpp": 8, "ep": 8, "etp": 2}, {"pp": 2, "vpp": 2, "ep": 2, "etp": 2}),
        ({}, {}),
        ({"nodes": 4}, {"gpus_per_node": 2}),
    ],
)
def test_twins_are_as_large_as_fits(layout, scaled):
    found = scaled_down.scale(make_run(layout={"gpus_per_node": 1, **layout}).layout, layers=4)
    assert found.world <= scaled_down.RANKS
    assert {key: getattr(found, key) for key in scaled} == scaled
    assert found.last_stage_layers == (1 if "first_stage_layers" in layout else None)
