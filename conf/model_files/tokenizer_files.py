"""Checks of a model folder's tokenizer files: their structure, and that every token has a row in the embedding.

Whether the tokenizers library can load them is checked in trainer/data/tokens/tokenizer.py.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from contract import json_object, regular_files
from contract.faults import Fault
from contract.json_object import show

WHOLE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"
OTHERS = ("tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
LACKS = f"no tokenizer ({WHOLE}); tokenizer.save_pretrained(FOLDER) writes one, or take the released model's"
# All files of a tokenizer, and chat templates.
NAMES = (WHOLE, SETTINGS, SPECIAL, ADDED, *OTHERS, "merges.txt", "chat_template.jinja", "chat_template.json")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SEVERAL = ("additional_special_tokens", "extra_special_tokens")


def check(folder: Path, rows: int | None) -> None:
    """Check the tokenizer's files. `rows` is the number of rows of the embedding: the config.json's vocab_size."""
    files = {name: json_object.read(folder / name) for name in (WHOLE, SETTINGS, SPECIAL, ADDED) if _is(folder, name)}
    if WHOLE not in files:
        others = [name for name in OTHERS if _is(folder, name)]
        if not are_among([*files, *others]):
            raise Fault(f"{folder}: {LACKS}")
        for name in others:
            regular_files.open_regular(folder / name).close()
    ids = dict(_ids_of_whole(folder / WHOLE, files[WHOLE])) if WHOLE in files else {}
    named: dict[str, Path] = {}
    for name, content in files.items():
        path = folder / name
        if name == SETTINGS:
            _check_template(path, content)
            ids |= _fit(path, dict(_ids_of_settings(path, content)), rows)
        if name == ADDED:
            ids |= _fit(path, dict(_ids_by_text(path, content, "")), rows)
        if name in (SETTINGS, SPECIAL):
            named |= dict.fromkeys(_named(path, content), path)
        if name == WHOLE:
            _fit(path, ids, rows)
    if WHOLE in files and rows is not None:
        _check_new(named, ids, rows)


def are_among(names: Collection[str]) -> bool:
    """Whether a model with files of these names has a tokenizer."""
    return any(name in names for name in (WHOLE, SETTINGS, *OTHERS))


def _is(folder: Path, name: str) -> bool:
    return regular_files.is_there(folder / name)


def _fit(path: Path, ids: dict[str, int], rows: int | None) -> dict[str, int]:
    if ids and rows is not None and max(ids.values()) >= rows:
        text = f"token id {max(ids.values())} does not fit the model, whose vocab_size is {rows}"
        raise Fault(f"{path}: {text}: this tokenizer belongs to another model")
    return ids


def _check_new(named: dict[str, Path], ids: dict[str, int], rows: int) -> None:
    """Check that special tokens missing from the vocabulary have rows. transformers gives them ids after all others."""
    new = [token for token in named if token not in ids]
    if new and max(ids.values(), default=-1) + len(new) >= rows:
        text = f"the special token {show(new[0])} is not in {WHOLE}"
        raise Fault(f"{named[new[0]]}: {text}, and the model has no row for a new one: vocab_size is {rows}")


def _ids_of_whole(path: Path, found: dict[str, Any]) -> Iterator[tuple[str, int]]:
    model = found.get("model")
    if not isinstance(model, dict):
        raise Fault(f"{path}: model is {show(model)}, which is not an object")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        yield from _ids_by_text(path, vocabulary, "model.vocab: ")
    elif isinstance(vocabulary, list):  # of a unigram model: pairs of a text and its score
        for number, pair in enumerate(vocabulary):
            if not (
                isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) in (int, float)
            ):
                raise Fault(f"{path}: model.vocab: {show(pair)} is not a text with its score")
            yield pair[0], number
    else:
        raise Fault(f"{path}: model.vocab is {show(vocabulary)}, which is not a vocabulary")
    merges = model.get("merges", [])
    if not isinstance(merges, list) or not all(map(_is_merge, merges)):
        raise Fault(f"{path}: model.merges is not a list of pairs of texts")
    added = found.get("added_tokens") or []
    if not isinstance(added, list):
        raise Fault(f"{path}: added_tokens is {show(added)}, which is not a list")
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str) or not _is_id(token.get("id")):
            raise Fault(f"{path}: added_tokens: {show(token)} is not an object with an id and its content")
        yield token["content"], token["id"]


def _ids_of_settings(path: Path, found: dict[str, Any]) -> Iterator[tuple[str, int]]:
    decoder = found.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise Fault(f"{path}: added_tokens_decoder is {show(decoder)}, which is not an object")
    for number, token in decoder.items():
        content = token.get("content") if isinstance(token, dict) else token
        if not (number.isascii() and number.isdigit() and len(number) < 10 and isinstance(content, str)):
            raise Fault(f"{path}: added_tokens_decoder: {show({number: token})} is not an id with a token")
        yield content, int(number)


def _ids_by_text(path: Path, found: dict[str, Any], place: str) -> Iterator[tuple[str, int]]:
    for text, number in found.items():
        if not _is_id(number):
            raise Fault(f"{path}: {place}the id of {show(text)} is {show(number)}, which is not an id")
        yield text, number


def _named(path: Path, found: dict[str, Any]) -> Iterator[str]:
    """Yield the special tokens that the file names."""
    for key in (*NAMED, *SEVERAL):
        value = found.get(key)
        several = value if key in SEVERAL and isinstance(value, list) else [value]
        if key in SEVERAL and isinstance(value, dict):
            several = list(value.values())
        for token in several:
            content = token.get("content") if isinstance(token, dict) else token
            if not isinstance(content, str) and token is not None:
                raise Fault(f"{path}: {key} is {show(value)}, which does not name a token")
            if content:
                yield content


def _check_template(path: Path, found: dict[str, Any]) -> None:
    template = found.get("chat_template")
    named = template if isinstance(template, list) else []
    if template is None or isinstance(template, str):
        return
    if not named or not all(isinstance(one, dict) and _texts(one, "name", "template") for one in named):
        raise Fault(f"{path}: chat_template is {show(template)}, which is neither a template nor a list of them")


def _texts(found: dict[str, Any], *keys: str) -> bool:
    return all(isinstance(found.get(key), str) for key in keys)


def _is_merge(merge: Any) -> bool:
    if isinstance(merge, list):
        return len(merge) == 2 and all(isinstance(half, str) for half in merge)
    return isinstance(merge, str)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
