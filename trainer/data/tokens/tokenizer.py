"""Load the tokenizer of a checkpoint folder with transformers, and convert texts to ids in batches.

load() needs 1.3 s and 80 MB. transformers alone needs 13 s and 800 MB: it imports torch if torch is installed, although
no tokenizer uses it. load() avoids torch if the process has imported neither of the two before. Such a process cannot
use transformers' models afterwards.

Padding and truncation are switched off, even if tokenizer.json sets them. Special tokens are never added: a template
writes the special tokens that it needs, and their names in a text become their ids.
"""

# pyright: reportArgumentType=false

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from conf.model_files import tokenizer_files
from conf.schema.run import Run
from contract import checksums, groups
from contract.faults import Fault
from trainer.patches import families
from trainer.patches.transformers_imports import import_transformers

Tokenizer = Any  # transformers' PreTrainedTokenizerBase, which cannot be named without importing it
Encoding = Any  # tokenizers.Encoding: ids, and which characters became which token

BATCH = 1 << 20  # characters per call; an Encoding takes about 100 bytes per character
# Files that determine the ids if tokenizer.json is missing.
FILES = (*tokenizer_files.OTHERS, "merges.txt")

# Tokens that Megatron-Bridge leaves out of the loss at any position.
SKIPPED = {*chain(*yaml.safe_load(Path(__file__).with_name("skipped_tokens.yaml").read_text()).values())}


def of(run: Run) -> Tokenizer:
    """Return the tokenizer for the rows of a run."""
    tokenizer = load(Path(run.paths.model), run.model.trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise Fault(f"paths.model: {run.paths.model}: the tokenizer has no eos_token, which pads sequences")
    return tokenizer


def load(folder: Path, trust_remote_code: bool) -> Tokenizer:
    if not folder.is_dir():
        raise Fault(f"paths.model: {folder}: no such folder; it holds the tokenizer")
    # Several processes work in parallel, so threads are not needed, and threads do not survive a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with _without_torch():
        if "transformers" not in sys.modules:
            import_transformers()
        from transformers import AutoTokenizer

        families.install_for(folder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:  # tokenizers raises plain Exceptions, and remote code may raise any type
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Fault(f"{folder}: no tokenizer that can be loaded: {line}") from None
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text."""
    if not tokenizer.is_fast:
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    return [encoding.ids for batch in _batches(texts) for encoding in encode(batch, add_special_tokens=False)]


def encodings(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[Encoding]:
    """Yield the encoding of each text: its ids, and the characters of each id.

    Post-processors are switched off. They add special tokens, and some (GPT-2, Llama 3) remove spaces from the
    characters of a token, so a turn that begins with a space would have no first token.
    """
    backend = tokenizer.backend_tokenizer
    for batch in _batches(texts):
        processor, backend.post_processor = backend.post_processor, None
        try:
            batch_encodings = backend.encode_batch(batch, add_special_tokens=False)
        finally:
            backend.post_processor = processor
        yield from batch_encodings


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    return groups.up_to(BATCH, ((text, len(text)) for text in texts))


def facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return digests of the files and the names of special tokens. Tokenizers with equal facts give equal ids."""
    folder = Path(tokenizer.name_or_path)
    names = (tokenizer_files.WHOLE,) if (folder / tokenizer_files.WHOLE).is_file() else FILES
    files = {name: checksums.of_file(folder / name) for name in names if (folder / name).is_file()}
    return {"files": files, "special_tokens": dict(tokenizer.special_tokens_map)}


def digest(folder: Path) -> str:
    """Return the digest of all files of a tokenizer and its chat template, without loading them."""
    paths = [p for p in folder.rglob("*") if p.name in tokenizer_files.NAMES or p.suffix in (".jinja", ".py")]
    lines = [f"{checksums.of_file(path)} {path.relative_to(folder)}" for path in sorted(paths)]
    return checksums.of("\n".join(lines))


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # `import torch` raises, and find_spec finds nothing
    try:
        yield
    finally:
        del modules["torch"]
