"""Values of drawn weights: those with which a family begins a training, a block of a few megabytes at a time.

Matrices, embeddings, sinks and biases of routers are normal with a standard deviation of initializer_range, norms 1,
other biases 0, and the embedding of pad_token_id is 0, as by transformers' from_config(). Families have exceptions.

Values follow from the seed, the tensor's name and the block, by NumPy's Philox and its ziggurat: the number of
processes and torch's vector units do not change them.
"""

import hashlib
import math
import re
from collections.abc import Iterator

import numpy as np
import torch

from conf import families
from conf.families.parts.family import Config
from trainer.weights.released_tensors import DTYPES

BLOCK = 1 << 20  # numbers
USUAL = 0.02  # initializer_range, if config.json lacks it
NORM = re.compile(r"(norm|\.ln_[12f])\.weight$")
EMBEDDING = re.compile(r"(embed_tokens|\bwte)\.weight$")
CORRECTION = "e_score_correction_bias"  # of routers; float32 in every release


def spread(config: Config, name: str) -> float:
    """Standard deviation of a tensor's numbers; 0 if all of them are the same."""
    usual = config.get("initializer_range") or USUAL
    if name.endswith(".mlp.router.bias"):
        return usual
    if NORM.search(name) or name.endswith("bias"):
        return 0.0
    family = families.of(config)
    if name.endswith(family.narrow):
        return usual / math.sqrt(2 * config[family.key("num_hidden_layers")])
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
    """Numbers of the embedding of padding that are drawn as 0."""
    token = config.get("pad_token_id")
    if token is None or not families.of(config).zero_padding or not EMBEDDING.search(name):
        return range(0)
    return range(token * shape[1], (token + 1) * shape[1])


def _generator(seed: int, name: str, block: int) -> np.random.Generator:
    key = hashlib.sha256(f"{seed} {block} {name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))


def encode(numbers: np.ndarray, dtype: str) -> bytes:
    """Bytes of fp32 numbers in a type of safetensors, rounded to the nearest, to even at halves."""
    return torch.from_numpy(numbers).to(DTYPES[dtype]).view(torch.uint8).numpy().tobytes()
