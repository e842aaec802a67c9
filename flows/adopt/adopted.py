"""Conversion of a source by the table of its stack: each key of the source is understood, left out, or unread."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from conf.load import KEYS, load
from conf.schema.run import sections
from contract.faults import ConfigError
from contract.installation import home
from flows.adopt.concepts import CONCEPTS, Settled, is_on, number, settle, whole
from flows.adopt.stack import NoCounterpartError, Source, Stack
from flows.new import commented_yaml
from flows.new.choices import Choice, Choices

ORDER = {key: place for place, key in enumerate(["name", *KEYS])}
NUMBERS = {
    **dict.fromkeys(("micro", "accumulation", "gpus", "nodes", "steps", "prompt_tokens"), whole),
    **dict.fromkeys(("epochs", "warmup_ratio", "warmup_steps", "min_lr_ratio"), number),
}
# Keys that a configuration needs: a value if neither the file nor the stack's defaults have one, and what to do then.
NEEDED = {
    "model.source": ("MODEL", "the file does not name the model: set its Hub id or folder"),
    "data.source": ("my.jsonl", "the file does not name the data: set a file, a folder or a Hub id"),
    "data.seq_length": (2048, "the file does not set the length: chosen here"),
    "train.epochs": (1, "the file sets neither steps nor epochs: chosen here"),
    "train.global_batch": (16, "the file sets no batch size: chosen here"),
    "optimizer.lr": (1e-4, "the file sets no learning rate: chosen here"),
    "checkpoint.save_every": ("epoch", "the file does not say when to save: chosen here"),
}
# Variables of a script that count if no key of the command has their meaning.
ENVIRONMENT = {
    **dict.fromkeys(("NPROC_PER_NODE", "GPUS_PER_NODE", "N_GPUS_PER_NODE", "NUM_GPUS", "CUDA_VISIBLE_DEVICES"), "gpus"),
    **dict.fromkeys(("NNODES", "NUM_NODES", "N_NODES"), "nodes"),
}
VARIABLE = "a variable of the script that the command does not use"
EMPTY = (None, "", [], {})
NO_VALUE = "has no value"
OUTPUT = re.compile(r"(.*[._])?(output_dir|run_name|save_dir|logging_dir|report_to|logging_steps|wandb.*)$")


@dataclass
class Adopted:
    """A configuration, and the fate of each key of the source."""

    stack: Stack
    source: Source
    text: str = ""
    understood: dict[str, str] = field(default_factory=dict)  # their key: our keys
    left_out: dict[str, str] = field(default_factory=dict)  # their key: the reason
    unread: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # our key: what to do
    differences: list[str] = field(default_factory=list)


def convert(source: Source, stack: Stack, name: str, folder: Any, gpus: int | None = None) -> Adopted:
    """Return our configuration for a source. `folder` is for a draft that is loaded to check each value."""
    adopted = Adopted(stack, source)
    origins: dict[str, list[str]] = {}  # target: their keys
    given: dict[str, Any] = {}
    for key, value in source.keys.items():
        _read(adopted, key, value, given, origins)
    for key, value in source.environment.items():
        _variable(adopted, key, value, given, origins)
    defaults = {**stack.defaults, **stack.defaults_of(source)}
    usual = {target: value for target, value in defaults.items() if target not in given}
    usual = _without_rivals(usual, given)
    settled = Settled(given) if stack.extends else settle(usual | given, gpus)
    for target, why in settled.unfit.items():
        _reject(adopted, origins.get(target, []), why)
    head = [f"From {stack.title}, by finetune adopt, which printed the differences in meaning."]
    values = _valid(adopted, settled, origins, name, folder)
    adopted.differences = list(dict.fromkeys([*stack.differences, *adopted.differences, *settled.differences]))
    adopted.differences += [f"{stack.title}: {note}" for note in source.notes]
    choices = Choices({}, {"name": Choice(name, "")})
    for key in values:
        theirs = [one for target, keys in origins.items() for one in keys if key in _ours(target)]
        why = adopted.missing.get(key) or ", ".join(dict.fromkeys(theirs)) or "follows from the other keys"
        if not theirs and key not in adopted.missing and any(key in _ours(target) for target in usual):
            why = f"default of {stack.title}"
        choices.made[key] = Choice(values[key], why[:300])
    adopted.text = _text(choices, head, stack)
    return adopted


def _text(choices: Choices, head: list[str], stack: Stack) -> str:
    choices.made = {key: choices.made[key] for key in sorted(choices.made, key=ORDER.__getitem__)}
    text = commented_yaml.text(choices, head, "")
    name = f"name: {choices.made['name'].value}\n"
    return text.replace(name, f"{name}extends: {stack.extends}\n", 1) if stack.extends else text


def _ours(target: str) -> list[str]:
    return [one.strip() for one in (CONCEPTS.get(target) or target).split(",")]


def _read(adopted: Adopted, key: str, value: Any, given: dict[str, Any], origins: dict[str, list[str]]) -> None:
    stack = adopted.stack
    spelled = stack.spelled(key)
    target = stack.keys.get(spelled)
    if target is None:
        reason = stack.reason(spelled)
        if reason is None and OUTPUT.fullmatch(spelled):
            reason = "names and logs are set by the flow"
        (adopted.unread if reason is None else adopted.left_out)[key] = reason or "no counterpart is known"
        return
    if value in EMPTY:
        adopted.left_out[key] = NO_VALUE
        return
    ours, convert = (target, None) if isinstance(target, str) else target
    try:
        value = convert(value) if convert else value
        values = value if isinstance(value, dict) and convert else {ours: value}
        values = {name: _typed(name, one) for name, one in values.items() if one is not None}
    except NoCounterpartError as error:
        adopted.unread[key] = str(error)
        return
    except (TypeError, ValueError):
        adopted.unread[key] = "a value of an unknown kind"
        return
    adopted.differences += filter(None, [values.pop("note", None)])
    for name, one in values.items():
        if name == "datasets" and name in given:
            given[name] = [*given[name], *(one if isinstance(one, list) else [one])]
        else:
            given[name] = one if name != "datasets" or isinstance(one, list) else [one]
        origins.setdefault(name, []).append(key)
    adopted.understood[key] = ", ".join(dict.fromkeys(one for name in values or [ours] for one in _ours(name)))


def _variable(adopted: Adopted, key: str, value: str, given: dict[str, Any], origins: dict[str, list[str]]) -> None:
    target = ENVIRONMENT.get(key)
    if target and target not in given:
        count = len(value.split(",")) if key == "CUDA_VISIBLE_DEVICES" else value
        try:
            given[target] = whole(count)
        except NoCounterpartError as error:
            adopted.unread[f"${key}"] = str(error)
            return
        origins.setdefault(target, []).append(f"${key}")
        adopted.understood[f"${key}"] = ", ".join(_ours(target))
    else:
        adopted.left_out[f"${key}"] = VARIABLE


@cache
def _kind(target: str) -> Callable[[Any], Any] | None:
    """Return the conversion to the type of a key here: values of commands are texts."""
    section, _, name = target.partition(".")
    kind = str(sections()[section].model_fields[name].annotation) if name and section in sections() else "str"
    if "Literal" in kind or "str" in kind:
        return None
    return next(
        (convert for name, convert in (("bool", is_on), ("float", number), ("int", whole)) if name in kind), None
    )


def _typed(target: str, value: Any) -> Any:
    if target in ("checkpoint.save_every", "train.validate_every") and value != "epoch":
        return whole(value)
    if convert := NUMBERS.get(target) or _kind(target):
        return convert(value)
    if isinstance(value, str) and "$" in value:
        raise NoCounterpartError(f"{value}: the value is not known; set the key here")
    return value


def _without_rivals(usual: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Drop defaults of keys for which the file sets an alternative."""
    rivals = {
        "epochs": ("steps", "train.steps", "train.epochs"),
        "warmup_ratio": ("warmup_steps", "optimizer.warmup_steps"),
        "warmup_steps": ("warmup_ratio", "optimizer.warmup"),
        "save_steps": ("save_strategy", "saves_per_epoch"),
        "micro": ("train.global_batch",),
    }
    return {key: value for key, value in usual.items() if not any(one in given for one in rivals.get(key, ()))}


def _reject(adopted: Adopted, keys: list[str], why: str) -> None:
    for key in keys:
        adopted.understood.pop(key, None)
        adopted.unread[key] = why


def _valid(adopted: Adopted, settled: Settled, origins: dict[str, list[str]], name: str, folder: Any) -> dict[str, Any]:
    """Return the values that can be loaded. A refused value counts as without counterpart, with the reason."""
    values = {key: value for key, value in settled.values.items() if key in KEYS}
    if adopted.stack.extends:
        preset = load(adopted.stack.extends, illegal=True).model_dump(mode="json")
        values = {key: value for key, value in values.items() if _of(preset, key) != value}
    if values.get("data.mixture"):
        values.pop("data.source", None)
    for key, (value, why) in {} if adopted.stack.extends else NEEDED.items():
        rival = {"train.epochs": "train.steps", "data.source": "data.mixture"}.get(key, key)
        if key not in values and rival not in values:
            values[key], adopted.missing[key] = value, why
    if values.get("train.objective") == "dpo":
        values.setdefault("evaluate.tasks", [])
    draft = folder / f"{name}.yaml"
    for _ in range(40):
        choices = Choices({}, {"name": Choice(name, "")} | {key: Choice(value, "") for key, value in values.items()})
        draft.write_text(_text(choices, [], adopted.stack))
        try:
            load(draft, illegal=True)
        except ConfigError as error:
            if not _repair(adopted, values, origins, [str(line) for line in error.args]):
                raise
        else:
            return values
    raise ConfigError(f"{home()}: the configuration cannot be made valid")


def _of(preset: dict[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return preset[section][name]


def _repair(adopted: Adopted, values: dict[str, Any], origins: dict[str, list[str]], wrong: list[str]) -> bool:
    """Remove the keys that the loader refuses. Needed keys get their usual value. Returns whether a key changed."""
    changed = False
    for line in wrong:
        match = re.search(r"(?:^|: )([a-z]+\.[a-z_0-9]+)(?:\[\d+\][.\w]*)?: (.*)", line)
        if not match:
            continue
        key, why = match.groups()
        if key not in values or (key in adopted.missing):
            continue
        theirs = [one for target, keys in origins.items() for one in keys if key in _ours(target)]
        _reject(adopted, theirs, f"{key}: {why}")
        if not theirs:
            adopted.differences.append(f"{key}: {values[key]} is refused here: {why}")
        del values[key]
        changed = True
        if key in NEEDED and not (key == "data.source" and "data.mixture" in values):
            values[key], adopted.missing[key] = NEEDED[key]
    return changed
