"""Choice of the files of a released model: one copy of the weights, as safetensors, and the files that describe them.

Repositories contain the same weights in several formats (original/, GGUF, pickle, ONNX), state of training runs, and
code. Names decide which files are fetched; each skipped file is listed with the reason. The small JSON files decide
whether the model is accepted: a model that requires its code or lacks shards is refused.
"""

import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from conf.model_files import tokenizer_files
from conf.model_files import weights as weights_files
from contract import json_object, regular_files
from contract.faults import Fault

OTHER_COPIES = {"original", "onnx", "openvino", "coreml", "tflite", "metal", "gguf"}  # folders
OTHER_FORMATS = {
    ".gguf",
    ".ggml",
    ".onnx",
    ".onnx_data",
    ".h5",
    ".msgpack",
    ".tflite",
    ".ot",
    ".pb",
    ".nemo",
    ".mlmodel",
}
PIECE = ".distcp"  # of a distributed checkpoint of torch, Megatron or FSDP
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"}
CODE = {".py", ".pyc", ".so"}
TRAINING_STATE = re.compile(r"(training_args|optimizer|scheduler|rng_state|random_states|scaler)")
VARIANT = re.compile(r"\.(fp16|fp32|bf16|non_ema)\b")

CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
UNSAFE = "model.unsafe_weights=true"
TRUST = "model.trust_remote_code=true"


def choose(names: Iterable[str], unsafe_weights: bool, trust_remote_code: bool) -> tuple[list[str], dict[str, str]]:
    """Names of the files to fetch, and the reason for each skipped file."""
    names = sorted(names)
    left_out = {name: reason for name in names if (reason := _never(name, trust_remote_code))}
    rest = [name for name in names if name not in left_out]
    weights = [name for name in rest if _format(name) == ".safetensors" and not name.endswith(".json")]
    pickles = [name for name in rest if _format(name) in PICKLES]
    pieces = {name for name in rest if _is_piece(name)}
    place = None if weights else weights_files.newest_checkpoint(rest, "model.source")
    newest = {name for name in pieces if name.rpartition("/")[0] == place}
    left_out |= dict.fromkeys(sorted(pieces - newest), "another copy of the weights")
    if weights or newest:
        kept = "safetensors contain" if weights else "distributed checkpoint contains"
        left_out |= dict.fromkeys(pickles, f"pickle; the {kept} the weights")
    elif pickles and not unsafe_weights:
        left_out |= dict.fromkeys(pickles, f"pickle, which can run code when it is loaded; {UNSAFE} allows it")
    else:
        weights = [name for name in pickles if not name.endswith(".json")]
    copies = set(_copies(weights))
    copies |= {f"{name}.index.json" for name in copies} & set(names)
    left_out |= dict.fromkeys(copies, "another copy of the weights")
    return [name for name in names if name not in left_out], left_out


def require_weights(source: str, chosen: Iterable[str], names: Iterable[str], unsafe_weights: bool) -> None:
    """Raise a Fault if no weights were chosen. It names the other formats and the key that allows them."""
    formats = {".safetensors", PIECE, *(PICKLES if unsafe_weights else ())}
    if any(_format(name) in formats and is_weights(name) for name in chosen):
        return
    if unread := next(filter(None, map(weights_files.unread, names)), None):
        raise Fault(f"{source}: its weights have {unread}")
    present = {_format(name) for name in names if not _never(name, True) or _format(name) in OTHER_FORMATS}
    pickles, others = sorted(present & PICKLES), sorted(present & OTHER_FORMATS)
    if pickles and not unsafe_weights:
        raise Fault(
            f"{source}: its weights are {' and '.join(pickles)} (pickle, which can run code when loaded), without "
            f"safetensors; choose a revision or a repository with safetensors, or allow these with {UNSAFE}"
        )
    content = f"only {', '.join(others)}" if others else "no file of weights at all"
    raise Fault(f"{source}: {content}; a model with *.safetensors is needed")


def require_tokenizer(source: str, names: Collection[str]) -> None:
    """Raise a Fault if the tokenizer is missing, before the weights are fetched."""
    if not tokenizer_files.are_among(names):
        raise Fault(f"model.source: {source}: {tokenizer_files.LACKS}")


def is_weights(name: str) -> bool:
    return _is_piece(name) or (_format(name) in {".safetensors", *PICKLES} and not name.endswith(".json"))


def are_adopted(chosen: Iterable[str]) -> bool:
    """Whether the weights have another form than a release's, and trainer.weights.adopted has to read them."""
    return any(is_weights(name) and _format(name) != ".safetensors" for name in chosen)


def unsafe_name(name: str) -> bool:
    """Whether a name from a server would lead out of its folder."""
    return name.startswith("/") or "\\" in name or "\0" in name or bool({"", ".", ".."} & set(name.split("/")))


def refuse_code(source: str, folder: Path, names: Iterable[str]) -> None:
    for name in (name for name in names if name in CONFIGS):
        if "auto_map" in json_object.parse(regular_files.read(folder / name), f"{source}: its {name}"):
            raise Fault(
                f"{source}: the auto_map in its {name} requires code of the repository; read that code and allow it "
                f"with {TRUST}, or use a revision for transformers' classes"
            )


def require_shards(source: str, folder: Path, names: Iterable[str], files: Iterable[str]) -> None:
    for name in (name for name in names if name.endswith(".safetensors.index.json")):
        shards = weights_files.index(folder / name, f"{source}: its {name}").values()
        lost = {(Path(name).parent / shard).as_posix() for shard in shards} - set(files)
        if lost:
            raise Fault(f"{source}: {name} lists {min(lost)}, which does not exist; the model is incomplete")


def _is_piece(name: str) -> bool:
    """Whether a file is of a distributed checkpoint."""
    return _format(name) == PIECE or PurePosixPath(name).name == weights_files.DESCRIPTION


def _format(name: str) -> str:
    """Format of a file by its name: .safetensors for model.safetensors and for its model.safetensors.index.json."""
    return PurePosixPath(name.removesuffix(".index.json")).suffix.lower()


def _never(name: str, trust_remote_code: bool) -> str | None:
    path = PurePosixPath(name)
    if unread := weights_files.unread(name):
        return unread
    if any(part.startswith(".") for part in path.parts if part != weights_files.DESCRIPTION):
        return "hidden"
    if _is_piece(name) and path.parent.name.startswith("optimizer"):
        return "state of a training run"
    if path.parts[0].lower() in OTHER_COPIES and len(path.parts) > 1:
        return "another copy of the weights"
    if _format(name) in OTHER_FORMATS:
        return f"another format of the weights ({_format(name)})"
    if _format(name) in CODE and not trust_remote_code:
        return f"code; {TRUST} allows it"
    if _format(name) in PICKLES and TRAINING_STATE.match(path.name):
        return "state of a training run"
    return None


def _copies(weights: list[str]) -> list[str]:
    """Second copies of weights in the same folder: consolidated*.pth, model.fp16.safetensors."""

    def second(name: str) -> bool:
        base = PurePosixPath(name).name
        return base.startswith("consolidated") or bool(VARIANT.search(base))

    with_first = {PurePosixPath(name).parent for name in weights if not second(name)}
    return [name for name in weights if second(name) and PurePosixPath(name).parent in with_first]
