"""conf/planner/parameters.py: what can be counted by hand, and that the parts of a model make the whole.

tests/trainer/test_rehearse.py compares with the models that Megatron builds.
"""

import ast
import json
import struct
from dataclasses import replace
from math import prod

import pytest

from conf import families
from conf.families.parts.tensors import BUFFER, COPY
from conf.load import FOLDER, load
from conf.model_facts import MODELS, facts_from_hf
from conf.planner import work
from conf.planner.parameters import Stage, active, held, linears, stages, total, trainable
from conf.planner.verdict import facts_of
from conf.rules.layout import problems
from conf.rules.model import adapted
from tests.support.drawn_models import make_run
from tests.support.known_models import known
from trainer.rehearsal import tiny_models

TINY = {f"tiny-{kind}": facts_from_hf(config) for kind, config in families.tiny().items()}
NAMES = [*sorted(path.stem for path in MODELS.glob("*.json")), *TINY]
NO_ADAPTER = {"kind": "none"}


def layout(**keys):
    world = prod(value for key, value in keys.items() if key in ("tp", "pp"))
    return make_run(layout={"gpus_per_node": world, **keys}, adapter=NO_ADAPTER)


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_total_is_what_the_released_files_hold(kind, tmp_path):
    tiny_models.make_model(kind, tmp_path / kind)
    found = 0
    for shard in (tmp_path / kind).glob("*.safetensors"):
        data = shard.read_bytes()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        found += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    assert total(facts_from_hf(json.loads((tmp_path / kind / "config.json").read_text()))) == found


@pytest.mark.parametrize(
    "name, billions, billions_active",
    [
        ("glm47", 358.3, 33.6),
        ("deepseek-v3", 684.5, 37.6),
        ("glm45-air", 110.5, 13.4),
        ("qwen3-235b", 235.1, 22.2),
        ("qwen3-30b-a3b", 30.5, 3.4),
        ("qwen3-8b", 8.2, 8.2),
        ("qwen2-moe", 57.4, 14.2),
        ("mixtral-8x7b", 46.7, 12.9),
        ("gpt-oss-20b", 20.9, 4.2),  # the card's 3.6 leave the embedding out
        ("gpt-oss-120b", 116.8, 5.7),  # 5.1
        ("nemotron-3-super", 123.6, 12.8),  # the card's 120.7 leave MTP out; the files have 247,222,108,160 bytes
        ("llama31-8b", 8.0, 8.0),
        ("llama31-70b", 70.6, 70.6),
        ("llama31-405b", 405.9, 405.9),
    ],
)
def test_totals_are_those_of_the_model_cards(name, billions, billions_active):
    facts = known(name)
    assert (round(total(facts) / 1e9, 1), round(active(facts) / 1e9, 1)) == (billions, billions_active)


@pytest.mark.parametrize(
    "billions, layers, hidden, ffn, heads, tied",
    [
        (0.6, 28, 1024, 3072, 16, True),
        (1.7, 28, 2048, 6144, 16, True),
        (4.0, 36, 2560, 9728, 32, True),
        (14.8, 40, 5120, 17408, 40, False),
        (32.8, 64, 5120, 25600, 64, False),
    ],
)
def test_the_other_sizes_of_qwen3_are_those_of_their_cards(billions, layers, hidden, ffn, heads, tied):
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn}
    sizes |= {"num_attention_heads": heads, "tie_word_embeddings": tied}
    config = json.loads((MODELS / "qwen3-8b.json").read_text())["config"]
    assert round(total(facts_from_hf(config | sizes)) / 1e9, 1) == billions


def test_gpt2_by_hand():
    layer = 12 * 1280 * 1280 + 13 * 1280  # four matrices with biases, two norms with biases
    facts = known("gpt2-large")
    assert total(facts) == 774_030_080 == 36 * layer + (50257 + 1024 + 2) * 1280
    on_one = held(layout(), facts, stages(layout(), facts)[0])
    assert on_one["output"] == 0 and on_one["embedding"] == (50304 + 1024) * 1280
    first, last = (held(layout(pp=2), facts, stage) for stage in stages(layout(pp=2), facts))
    assert first["output"] == 0 and last["output"] == 50304 * 1280  # tied, and yet on both ends of the pipeline


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_stages_together_hold_the_model(name, pp):
    facts = TINY.get(name) or known(name)
    facts = replace(facts, layers=12, dense_layers=2, mtp_layers=facts.mtp_layers, vocab_pad=0, positions=0)
    run = layout(pp=pp)
    found = sum(sum(held(run, facts, stage).values()) for stage in stages(run, facts))
    embedding, layers = facts.vocab * facts.hidden, facts.mtp_layers
    every = [tensor for kind in [*facts.kinds, *["mtp"] * layers] for tensor in families.layer(facts, kind)]
    whole = total(facts) - sum(tensor.size for tensor in every if tensor.kind in (BUFFER, COPY))
    whole += embedding * (pp - 1) * (facts.tied + (layers > 0))  # copies of Megatron's
    assert found == whole


def test_ranks_together_hold_the_model():
    """Of what tp and ep cut; norms, routers and the bias of rows are whole on every rank."""
    facts = known("glm47")
    alone = held(layout(), facts, stages(layout(), facts)[0])
    cut = layout(tp=4, ep=8, etp=2)
    part = held(cut, facts, stages(cut, facts)[0])
    for key in ("embedding", "output", "mlp", "shared_experts", "attention"):
        assert part[key] * 4 == alone[key]
    assert part["experts"] * 16 == alone["experts"]
    assert (part["router"], part["norms"]) == (alone["router"], alone["norms"])


def test_where_layers_lie():
    facts = replace(known("glm47"), layers=8, mtp_layers=1)
    run = layout(pp=2, vpp=2)
    assert stages(run, facts) == [
        Stage(0, ("dense", "dense"), True, False, 0),
        Stage(0, ("moe", "moe"), False, False, 1),
        Stage(1, ("dense", "moe"), False, False, 0),
        Stage(1, ("moe", "moe", "mtp"), True, True, 1),
    ]
    uneven = layout(pp=4, first_stage_layers=3, last_stage_layers=1)
    assert [len(stage.layers) for stage in stages(uneven, facts)] == [3, 2, 2, 2]
    without = uneven.model_copy(update={"model": uneven.model.model_copy(update={"mtp": False})})
    assert [stage.embedding for stage in stages(without, facts)] == [True, False, False, False]


def test_what_is_trained():
    facts = replace(known("glm47"), layers=4)
    stage = stages(layout(), facts)[0]
    found = held(layout(), facts, stage)
    assert trainable(layout(), facts, stage) == (sum(found.values()) - found["experts"], found["experts"])
    frozen = make_run(adapter=NO_ADAPTER, moe={"freeze_router": True})
    assert trainable(frozen, facts, stage)[0] == sum(found.values()) - found["experts"] - found["router"]
    lora = make_run(adapter={"targets": ["linear_fc2"], "rank": 4})
    mlps = 3 * (12288 + 5120) + 2 * (1536 + 5120)  # 3 dense layers; 1 MoE and 1 MTP layer with a shared expert
    assert trainable(lora, facts, stage) == (4 * mlps, 4 * 2 * 160 * (1536 + 5120))
    shared = make_run(adapter={"targets": ["linear_fc2"], "rank": 4, "experts": "shared"})
    assert trainable(shared, facts, stage) == (4 * mlps, 4 * 2 * (1536 + 5120))
    dora = make_run(adapter={"targets": ["linear_qkv"], "rank": 4, "kind": "dora"})
    width = (96 + 2 * 8) * 128
    assert trainable(dora, facts, stage) == (5 * (4 * (5120 + width) + width), 0)


@pytest.mark.parametrize("name", ["glm47", "deepseek-v3-64", "llama31-70b"])
def test_all_linear_is_the_list_of_what_the_model_has(name):
    run = load(name, ["adapter.targets=all-linear"])
    facts = facts_of(run)
    has = sorted({linear.name for kind in facts.kinds for linear in linears(facts, kind)})
    listed = load(name, [f"adapter.targets=[{','.join(has)}]"])
    assert adapted(run, facts) == adapted(listed, facts) == {*has}
    assert problems(run, facts) == problems(listed, facts)
    for stage in stages(run, facts):
        assert trainable(run, facts, stage) == trainable(listed, facts, stage)
    assert all(work.calls(run, facts, kind) == work.calls(listed, facts, kind) for kind in facts.kinds)


def test_the_word_all_linear_is_read_as_names_everywhere():
    """A name is in the word all-linear as well, or not: `name in adapter.targets` would be wrong in silence."""
    files = [file for room in ("conf", "tasks", "trainer", "flows") for file in (FOLDER.parent / room).rglob("*.py")]
    found = [file.name for file in files if file.parent.name != "schema" and _reads_targets(file.read_text())]
    assert found == ["contradictions.py"]  # which asks whether it is empty


def _reads_targets(code: str) -> bool:
    """Whether code outside of messages reads adapter.targets."""
    tree = ast.parse(code)
    shown = {id(part) for text in ast.walk(tree) if isinstance(text, ast.JoinedStr) for part in ast.walk(text)}
    reads = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "targets")
    return any(ast.unparse(node.value).endswith(("adapter", "adapters")) for node in reads if id(node) not in shown)
