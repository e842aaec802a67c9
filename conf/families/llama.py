"""Llama 2 to 3.3, and models that are built like it.

With 2 tensor ranks, Megatron pads the vocabulary of 500 of the tiny model to 504.
"""

from conf.families.parts.family import ANY, DEFAULT, PLAIN, SILU, YARN, Family, Rotation, Serving

LINEAR = {"linear": Rotation({"factor": ANY}, ("factor",))}
FACTORS = {"low_freq_factor": (1,), "high_freq_factor": (4,), "original_max_position_embeddings": (8192,)}
LLAMA3 = {"llama3": Rotation({"factor": ANY} | FACTORS, ("factor", *FACTORS))}

FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    read=PLAIN,
    assumed=SILU | {"attention_bias": (False,), "mlp_bias": (False,)},
    rotations=DEFAULT | LINEAR | LLAMA3 | YARN,
    serving=Serving(packed=True),
    gguf="llama",
    releases={
        "meta-llama/Llama-3.2-1B-Instruct": 1.24,
        "meta-llama/Llama-3.1-70B-Instruct": 70.6,
        "meta-llama/Llama-3.1-405B-Instruct": 406.0,
    },
)
