"""What a command needs on disk, checked without torch before any rank is started: in a second, but for the data.

Each check raises a Fault of one line that names the file, what is wrong with it and what would be right.
"""

import json
import os
import shutil
import struct
from pathlib import Path

from conf.facts import facts_from_hf
from conf.layout import problems
from conf.output_marks import TRAINING
from conf.schema import Run
from trainer import checkpoints, places, prepared, resume
from trainer.faults import Fault
from trainer.recipe import checkpoint_folder

BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # any other type: 1, or not checked


def check_convert(run: Run) -> None:
    config = check_model(run)
    _check_space(Path(run.paths.base), run, "the converted model")
    _check_layout(run, config)


def check_train(run: Run) -> None:
    config = check_model(run)
    checkpoints.require(Path(run.paths.base), "paths.base", "python -m trainer.convert")
    _check_layout(run, config)
    resume.check(run, checkpoint_folder(run))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        places.take(Path(run.paths.output), TRAINING)
    if "RANK" not in os.environ:  # ranks find made what the process before them has made
        prepared.make(run)
    prepared.check(run)
    resume.check_data(run, checkpoint_folder(run))


def check_export(run: Run) -> None:
    config = check_model(run)
    checkpoints.require(Path(run.paths.base), "paths.base", "python -m trainer.convert")
    _check_space(Path(run.paths.export), run, "the exported model")
    _check_layout(run, config)


def check_evaluate(run: Run) -> None:
    folder, tasks = Path(run.paths.served), run.evaluate.tasks
    if not folder.is_dir():
        raise Fault(f"paths.served: {folder}: no such folder; it holds a model in Hugging Face format (trainer.export)")
    if not tasks:
        raise Fault("evaluate.tasks: empty; held_out is the data's test split")
    check_folder(folder)
    for name in tasks:
        if name.endswith((".yaml", ".yml")) and not is_file(name):
            raise Fault(f"evaluate.tasks: {name}: no such file in {Path.cwd()}")
    if "held_out" in tasks:
        file = Path(run.paths.data) / "test.jsonl"
        if not file.exists() or not file.stat().st_size:
            what = "empty" if file.exists() else "no such file"
            raise Fault(f"{file}: {what}; a larger share of data.test, or evaluate.tasks without held_out, would do")


def is_file(task: str) -> bool:
    """Whether an evaluation task is a file of one's own, not a name that lm-eval knows."""
    return task.endswith((".yaml", ".yml")) and Path(task).is_file()


def check_model(run: Run) -> dict:
    """The released checkpoint is whole and its tokenizer fits it. Returns its config.json."""
    folder = Path(run.paths.model)
    if not folder.is_dir():
        raise Fault(f"paths.model: {folder}: no such folder; it holds the released checkpoint in Hugging Face format")
    return check_folder(folder)


def check_folder(folder: Path) -> dict:
    config = _read_json(folder / "config.json")
    if not config.get("architectures"):
        raise Fault(f"{folder / 'config.json'}: architectures is missing, so the kind of model is unknown")
    for shard in _shards(folder):
        _check_safetensors(shard)
    _check_tokenizer(folder, config)
    return config


def _read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise Fault(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise Fault(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(found, dict):
        raise Fault(f"{path}: holds a {type(found).__name__}, not an object")
    return found


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise Fault(f"{folder}: neither model.safetensors nor {index.name}; only safetensors are read")
        return [single]
    weights = _read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise Fault(f"{index}: weight_map is missing")
    shards = sorted({folder / name for name in weights.values()})
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise Fault(f"{folder}: {len(missing)} of the {len(shards)} shards in {index.name} are missing: {missing[0]}")
    return shards


def _check_safetensors(path: Path) -> None:
    """The header can be read, and the file is as long as its last tensor needs."""
    size = path.stat().st_size
    with path.open("rb") as f:
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise Fault(f"{path}: truncated: {size} bytes do not even hold the header; download it again")
        try:
            header = json.loads(f.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Fault(f"{path}: the header is no safetensors header; download it again") from None
    if 8 + length + end != size:
        raise Fault(f"{path}: truncated: {size} bytes, but its tensors need {8 + length + end}; download it again")
    for name, entry in tensors.items():
        needed = BYTES.get(entry["dtype"], 0)
        for length in entry["shape"]:
            needed *= length
        if needed and needed != entry["data_offsets"][1] - entry["data_offsets"][0]:
            raise Fault(f"{path}: {name}: shape {entry['shape']} does not match its bytes; download it again")


def _check_tokenizer(folder: Path, config: dict) -> None:
    path = folder / "tokenizer.json"
    if not path.exists():
        if not any((folder / name).exists() for name in ("tokenizer.model", "tokenizer_config.json")):
            raise Fault(f"{folder}: no tokenizer (tokenizer.json); take it from the released model")
        return
    tokenizer = _read_json(path)
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
    rows = config.get("vocab_size")
    if ids and isinstance(rows, int) and max(ids) >= rows:
        raise Fault(
            f"{path}: token id {max(ids)} does not fit the model, whose vocab_size is {rows}: "
            "this tokenizer belongs to another model"
        )


def _check_layout(run: Run, config: dict) -> None:
    try:
        found = problems(run, facts_from_hf(config))
    except ValueError as error:
        raise Fault(f"{Path(run.paths.model) / 'config.json'}: {error}") from None
    if found:
        raise Fault("\n".join(found))


def _check_space(folder: Path, run: Run, what: str) -> None:
    needed = sum(path.stat().st_size for path in _shards(Path(run.paths.model)))  # as large as the released model
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise Fault(f"{folder}: {what} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free there")
