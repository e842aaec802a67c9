"""The merged model in the release's types: the released checkpoint with the trained weights, in the same files.

Each file keeps its header, byte by byte, so every tensor keeps its shape and place. Each tensor is read back after it
is written (parts.py): an untrained weight must have the released checksum, a merged weight must equal a second
computation from the adapter's factors, a new value must be the written one, and every value must be finite.

Weights of a quantised release are unpacked: the file then has a new header, with the same weights in the same order and
no scales. Configuration, tokenizer and chat template are copied, but config.json loses quantization_config. The model
card is not copied, because it describes the released model.
"""

import json
import shutil
from pathlib import Path

from conf.model_files import config_json, quantization, weights
from contract import checksums, json_object
from trainer.weights import new_safetensors
from trainer.weights.exported import parts
from trainer.weights.released import Model

QUANTISED = "hf_quant_config.json"  # of ModelOpt; with it, vLLM treats a model as quantised
NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".md"}


def layouts(model: Model, as_released: bool = False) -> list[parts.Layout]:
    """Return the files of the merged model. Without codes, files that contain only scales are left out."""
    if as_released or not model.packed:
        return [unchanged(model, file) for file in model.files()]
    files = {model.tensors[model.parts(name)[0]].file for name in model.weights}
    return [_unpacked(model, file) for file in sorted(files)]


def copy_other_files(model: Model, folder: Path, as_released: bool = False) -> str | None:
    """Copy configuration, tokenizer and chat template. Return the SHA-256 of the chat template, if any."""
    for path in other_files(model):
        shutil.copyfile(path, folder / path.name)
        (folder / path.name).chmod(parts.READABLE)
    if model.packed and not as_released:
        _describe_unpacked(model, folder)
    template = folder / "chat_template.jinja"
    return checksums.of(template.read_bytes()) if template.exists() else None


def other_files(model: Model) -> list[Path]:
    """Return the release's configuration, tokenizer and chat template."""
    files = [path for path in sorted(model.folder.iterdir()) if path.is_file() and path.suffix not in NOT_COPIED]
    return [path for path in files if not path.name.startswith(".") and path.name != QUANTISED]


def unchanged(model: Model, file: str) -> parts.Layout:
    """Return a released file with its own header."""
    rows = {name: entry for name, entry in model.tensors.items() if entry.file == file}  # in the order of their bytes
    with (model.folder / file).open("rb") as f:
        return parts.Layout(file, rows, f.read(next(iter(rows.values())).start))


def _unpacked(model: Model, file: str) -> parts.Layout:
    """Return the file with weights in place of codes."""
    of_codes = {one.codes: name for name, one in model.packed.items()}
    names = [of_codes.get(name, name) for name in unchanged(model, file).rows]
    shapes = {name: (one.dtype, one.shape) for name in names if (one := model.weights.get(name))}
    header, rows = new_safetensors.header(file, shapes)
    return parts.Layout(file, rows, header)


def _describe_unpacked(model: Model, folder: Path) -> None:
    """Write config.json and the index of weights that are no longer quantised."""
    config = json_object.read(model.folder / config_json.NAME)
    for section in (config, config.get("text_config")):
        (section or {}).pop(quantization.KEY, None)
    (folder / config_json.NAME).write_text(json.dumps(config, indent=2) + "\n")
    if (folder / weights.INDEX).exists():
        files = layouts(model)
        places = {name: layout.file for layout in files for name in layout.rows}
        new_safetensors.write_index(folder, sum(layout.size for layout in files), places)
