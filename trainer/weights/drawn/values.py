"""Values of drawn weights: those with which a family begins a training, a block of a few megabytes at a time.

Matrices, embeddings, sinks and routers' biases are normal with a standard deviation of initializer_range, norms 1,
other biases 0, and the embedding of pad_token_id is 0, as transformers' from_config() has them. GPT-2's output
projections spread less by the root of twice the number of layers, as its paper says and Megatron does; transformers
5.12.1 means to, and compares a name that no tensor has.

Values follow from the seed, the tensor's name and the block alone, by NumPy's Philox and its ziggurat: neither the
number of processes nor torch's vector units bear on them.
"""

import hashlib
import math
import re
from collections.abc import Iterator

import numpy as np

from conf.families.parts.family import Config

BLOCK = 1 << 20  # numbers
USUAL = 0.02  # initializer_range, where config.json does not say
NORM = re.compile(r"(norm|\.ln_[12f])\.weight$")
EMBEDDING = re.compile(r"(embed_tokens|\bwte)\.weight$")
CORRECTION = "e_score_correction_bias"  # of routers; float32 in every release


def spread(config: Config, name: str) -> float:
    """Standard deviation of a tensor's numbers; 0 where all of them are the same."""
    usual = config.get("initializer_range") or USUAL
    if name.endswith(".mlp.router.bias"):  # gpt-oss's
        return usual
    if NORM.search(name) or name.endswith("bias"):
        return 0.0
    if config["model_type"] == "gpt2" and name.endswith("c_proj.weight"):
        return usual / math.sqrt(2 * config["n_layer"])
    return usual


def blocks(config: Config, name: str, shape: tuple[int, ...], seed: int) -> Iterator[np.ndarray]:
    """All numbers of a tensor in fp32, in the order of its bytes."""
    count, deviation = math.prod(shape), spread(config, name)
    constant = 1.0 if NORM.search(name) else 0.0
    hole = _padding(config, name, shape)
    for number, start in enumerate(range(0, count, BLOCK)):
        size = min(BLOCK, count - start)
        if not deviation:
            yield np.full(size, constant, np.float32)
            continue
        found = _generator(seed, name, number).standard_normal(size, np.float32)
        found *= np.float32(deviation)
        found[max(0, hole.start - start) : max(0, hole.stop - start)] = 0
        yield found


def _padding(config: Config, name: str, shape: tuple[int, ...]) -> range:
    """Numbers of the embedding of padding. GPT-2's has none."""
    token = config.get("pad_token_id")
    if token is None or config["model_type"] == "gpt2" or not EMBEDDING.search(name):
        return range(0)
    return range(token * shape[1], (token + 1) * shape[1])


def _generator(seed: int, name: str, block: int) -> np.random.Generator:
    key = hashlib.sha256(f"{seed} {block} {name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))


def encode(numbers: np.ndarray, dtype: str) -> bytes:
    """Bytes of fp32 numbers in a type of safetensors; bf16 is rounded to the nearest, to even at halves."""
    if dtype == "F32":
        return numbers.astype("<f4", copy=False).tobytes()
    if dtype == "F16":
        return numbers.astype("<f2").tobytes()
    bits = numbers.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2").tobytes()
