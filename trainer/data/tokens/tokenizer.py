"""Tokenizer of a checkpoint folder, as transformers loads it, and texts to ids in batches.

load() needs 1.3 s and 80 MB; transformers alone needs 13 s and 800 MB, because it imports torch if it is installed, and
no tokenizer uses it. Only a process that has imported neither before avoids torch, and can then not use
transformers' models.

Padding and truncation that tokenizer.json may ask for are switched off. Special tokens are never added: a template
writes those it wants, and their names in a text become their ids.
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

BATCH = 1 << 20  # characters per call: an Encoding takes some 100 bytes for each
# Files that decide on ids: tokenizer.json alone, or those that stand in for it.
FILES = (*tokenizer_files.OTHERS, "merges.txt")

# Tokens that Megatron-Bridge takes out of the loss wherever they stand.
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
    # Processes that work side by side need no threads, and threads do not survive a fork.
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
        except Exception as error:  # of any kind: tokenizers raises plain Exceptions, and remote code whatever it likes
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Fault(f"{folder}: no tokenizer that can be loaded: {line}") from None
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text."""
    if not tokenizer.is_fast:
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    return [encoding.ids for batch in _batches(texts) for encoding in encode(batch, add_special_tokens=False)]


def encodings(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[Encoding]:
    """Ids of each text, with the characters of each id.

    Post-processors add special tokens, which are not wanted here, and some of them take spaces out of the characters of
    a token (GPT-2, Llama 3): a turn that begins with one would have no first token.
    """
    backend = tokenizer.backend_tokenizer
    for batch in _batches(texts):
        processor, backend.post_processor = backend.post_processor, None
        try:
            found = backend.encode_batch(batch, add_special_tokens=False)
        finally:
            backend.post_processor = processor
        yield from found


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    return groups.up_to(BATCH, ((text, len(text)) for text in texts))


def facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """Facts by which two tokenizers give the same ids: digests of their files, and the names of the special tokens."""
    folder = Path(tokenizer.name_or_path)
    names = (tokenizer_files.WHOLE,) if (folder / tokenizer_files.WHOLE).is_file() else FILES
    files = {name: checksums.of_file(folder / name) for name in names if (folder / name).is_file()}
    return {"files": files, "special_tokens": dict(tokenizer.special_tokens_map)}


def digest(folder: Path) -> str:
    """Digest of all files that a tokenizer and its chat template are loaded from, without loading them."""
    found = [p for p in folder.rglob("*") if p.name in tokenizer_files.NAMES or p.suffix in (".jinja", ".py")]
    lines = [f"{checksums.of_file(path)} {path.relative_to(folder)}" for path in sorted(found)]
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
