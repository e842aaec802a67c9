"""OpenAI's gpt-oss: experts with biases, released as stacks of all experts; sinks; windows in every second layer.

intermediate_size is the width of an expert. down_proj of the tiny model is square, as in the releases.
"""

from functools import partial

from conf.families.parts import tensors
from conf.families.parts.family import HEADS, LOST, PLAIN, SILU, Balance, Family, Rotation, Serving
from conf.families.parts.keys import llama_facts
from conf.families.parts.sizes import ModelFacts
from conf.families.parts.tensors import Tensor, Tensors

SCALED = {"factor": (32,), "original_max_position_embeddings": (4096,), "truncate": (False,)}
SCALED |= {"beta_fast": (32,), "beta_slow": (1,)}
TURNS = ("sliding_attention", "full_attention")
UNTRIED = "vLLM was not tested with an adapter of gpt-oss's experts next to the base"


def layer(facts: ModelFacts, kind: str) -> Tensors:
    return [*tensors.norms(facts), *tensors.attention(facts), *_experts(facts)]


def _experts(facts: ModelFacts) -> Tensors:
    """Return the router and experts of a layer. Matrices are stored as (inputs, outputs); gate and up alternate."""
    hidden, width, count = facts.hidden, facts.expert_ffn, facts.experts

    def stack(name: str, *shape: int, part: str) -> Tensor:
        turned = len(shape) == 2
        return Tensor(name, (count, *shape), "experts", part, turned, experts=count, stacked=True)

    return [
        Tensor("mlp.router.weight", (count, hidden), "router"),
        Tensor("mlp.router.bias", (count,), "router"),
        stack("mlp.experts.gate_up_proj", hidden, 2 * width, part="linear_fc1"),
        stack("mlp.experts.gate_up_proj_bias", 2 * width, part="linear_fc1"),
        stack("mlp.experts.down_proj", width, hidden, part="linear_fc2"),
        stack("mlp.experts.down_proj_bias", hidden, part="linear_fc2"),
    ]


FAMILY = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    read=PLAIN | {"num_local_experts", "num_experts", "num_experts_per_tok", "attention_bias", "sliding_window"},
    assumed=SILU | {"swiglu_limit": (7,), "initial_context_length": (4096,)},
    fixed={"tie_word_embeddings": False, "attention_bias": True},
    rotations={"yarn": Rotation(SCALED, tuple(SCALED), LOST)},
    defaults={"norm_topk_prob": True},
    repeats={"experts_per_token": "num_experts_per_tok"},
    stated=("num_local_experts", *HEADS, "sliding_window"),
    not_null=("num_local_experts", *HEADS),
    layer_turns=TURNS,
    facts=partial(llama_facts, linear_bias=True, sinks=True, windows=True),
    layer=layer,
    balance=Balance(),
    serving=Serving(expert_adapters=UNTRIED),
    releases={"openai/gpt-oss-20b": 20.9},
)
