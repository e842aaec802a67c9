"""An adapter in PEFT's format, by its adapter_config.json and the header of its safetensors.

    read(folder, config) -> Adapter     every tensor has its place in the model of this config.json, or a Fault names it

PEFT, TRL, Axolotl, Unsloth, LLaMA-Factory and ms-swift write this format. Names of modules are compared without their
beginning, as model. and language_model. depend on transformers' class and version, and without the wrappers of FSDP and
torch.compile. The spelling of target_modules does not matter: the tensors in the file decide.

Experts. Older transformers have one module per expert. transformers 5 has all experts of a layer in two parameters, and
PEFT an A of shape [experts * rank, inputs] and a B of shape [outputs, rank * experts] for each (target_parameters). The
columns of one expert are `experts` apart in B. PEFT before 0.19 took the outputs of most families for the inputs, so
its A and B are exchanged. The file does not say which parameter it is, so the shapes decide.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Any

from conf import families
from conf.families.parts.keys import Keys
from conf.families.parts.tensors import Tensor
from conf.model_files import config_json, safetensors_header
from conf.model_files.safetensors_header import Entry
from contract import json_object, regular_files
from contract.faults import Fault

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
EXPERT = re.compile(
    r"(?P<layer>.+)\.(?P<mlp>mlp|block_sparse_moe|mixer)\.experts\.(?P<number>\d+)\.(?P<leaf>(gate|up|down)_proj|w[123])\.weight$"
)
STACK = re.compile(r"(?P<module>.+\.experts)\.(?P<leaf>gate_up|down)_proj$")  # a released tensor of all experts
LEAVES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"} | {"w1": "gate", "w3": "up", "w2": "down"}
BEGINNING = re.compile(r"^((base_model|model|language_model|transformer|backbone|module)\.)+")
WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
LORA = re.compile(
    r"(?P<module>.+?)(?P<inner>(\.base_layer)*)\.lora_(?P<embedding>embedding_)?(?P<kind>A|B|magnitude_vector)"
    r"(\.(?!weight$|bias$)\w+)?(?P<bias>\.bias)?(\.weight)?"
)
TOKENS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(\.\w+)?$")
SAVED = re.compile(r"\.modules_to_save(\.default)?(?=\.)|\.base_layer(?=\.(weight|bias)$)")
# Keys of adapter_config.json with which the adapter is another function, unless their value is empty.
OTHERS = ("layer_replication", "use_qalora", "alora_invocation_tokens", "megatron_config", "use_bdlora", "arrow_config")
OTHERS += ("kasa_config", "monteclora_config", "velora_config", "lora_bias")
REPLACES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # init_lora_weights that change the base's weights
EXCHANGED_BEFORE = (0, 19)  # versions of PEFT
ORDERS = {"rank_major": False, "grouped_by_expert": True}  # Unsloth's names: whether B is grouped
# Families whose experts' B is grouped by expert in files of Unsloth that do not name the order.
GROUPED = {"deepseek_v3", "ernie4_5_moe", "gemma4", "glm4_moe", "glm4_moe_lite", "gpt_oss", "lfm2_moe", "mixtral"}
GROUPED |= {"qwen3_5_moe", "qwen3_moe", "qwen3_next"}
UNSAFE = (
    f"{PICKLED} is a pickle, which can run code when it is loaded; in its folder, "
    'python -c "import torch; from safetensors.torch import save_file; '
    f"save_file(torch.load('{PICKLED}', weights_only=True), '{WEIGHTS}')\""
)
MERGE = "model.merge_adapter takes it, in place of model.adapter"


@dataclass(frozen=True)
class Change:
    """The low-rank change of a released weight, or of one expert of a stack."""

    a: str  # names of tensors in the file
    b: str
    rank: int
    scale: float
    magnitude: str = ""  # of DoRA
    expert: int | None = None  # its number in A and B
    experts: int = 1  # in A and B
    half: int | None = None  # of B's rows: 0 = gate, 1 = up
    exchanged: bool = False  # A has the outputs of the weight, and B its inputs
    grouped: bool = False  # B has the columns of one expert after another

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.a, self.b, self.magnitude)))


Weight = tuple[str, int | None]  # released name, and the number of the expert if the tensor has all experts


@dataclass(frozen=True)
class Adapter:
    folder: Path
    entries: dict[str, Entry]  # of the file
    tensors: dict[str, Tensor]  # of the model
    changes: dict[Weight, Change] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)  # released tensors that are replaced: key in the file
    rows: dict[str, tuple[str, list[int]]] = field(default_factory=dict)  # rows that are replaced: key, their numbers


def read(folder: Path, model: dict[str, Any], names: Collection[str] = (), key: str = "model.adapter") -> Adapter:
    """Return the adapter's tensors by the released weight that they change.

    `model` is the content of a config.json; `names` are the tensors of its release, if they are known.
    """
    reader = _Reader(folder, model, names, key)
    reader.read()
    return reader.adapter


def module(name: str) -> str:
    """Return the module's name in transformers. Releases of some families begin differently."""
    name = re.sub(r"^backbone\.", "model.", name)
    name = re.sub(r"^language_model\.model\.", "model.language_model.", name)
    return re.sub(r"^h\.", "transformer.h.", name).removesuffix(".weight")


def canonical(name: str) -> str:
    """Return a module's or tensor's name without its beginning, by transformers 5's name of experts."""
    name = BEGINNING.sub("", WRAPPERS.sub("", name)).replace("block_sparse_moe.", "mlp.")
    return re.sub(r"(?<=\.experts\.)(\d+)\.(\w+)", lambda m: f"{m[1]}.{LEAVES.get(m[2], m[2])}", name)


class _Reader:
    """Finds the place of each tensor of an adapter."""

    def __init__(self, folder: Path, model: dict[str, Any], names: Collection[str], key: str):
        self.folder, self.key = folder, key
        self.config = self._config()
        family = families.of(model)
        tensors = family.tensors(family.facts(Keys(config_json.of_text(model))), names)
        self.adapter = Adapter(folder, safetensors_header.read(folder / WEIGHTS), tensors)
        self.names = {canonical(name): name for name in tensors}
        self.model_type = str(model.get("model_type")).removesuffix("_text")
        self.tied = model.get("tie_word_embeddings", family.defaults.get("tie_word_embeddings"))
        self.embedding = family.embedded(tensors)

    def refused(self, problem: str, remedy: str = "") -> Fault:
        return Fault(f"{self.key}: {self.folder}: {problem}{remedy and f'; {remedy}'}")

    def _config(self) -> dict[str, Any]:
        if not regular_files.is_there(self.folder / WEIGHTS) and regular_files.is_there(self.folder / PICKLED):
            raise self.refused(UNSAFE)
        if missing := next(
            (name for name in (CONFIG, WEIGHTS) if not regular_files.is_there(self.folder / name)), None
        ):
            of_flow = "; only python -m flows.finetune accepts a name on the Hub, s3:// and models:/"
            raise Fault(
                f"{self.key}: {self.folder}: no {missing}; it is a folder with PEFT's {CONFIG} and {WEIGHTS}{of_flow}"
            )
        config = json_object.read(self.folder / CONFIG)
        if config.get("peft_type") != "LORA":
            raise self.refused(f"is {config.get('peft_type')}, but only LoRA and DoRA can be read")
        if other := next((name for name in OTHERS if config.get(name)), None):
            raise self.refused(
                f"{CONFIG}: {other} is set, and is not supported", "merge it with PEFT's merge_and_unload()"
            )
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(REPLACES_BASE):
            text = f"{CONFIG}: init_lora_weights {start} has changed the weights of its base, which the file lacks"
            raise self.refused(text, "save it with path_initial_model_for_weight_conversion")
        return config

    def read(self) -> None:
        pairs: dict[tuple[str, str], dict[str, str]] = {}
        for name in self.adapter.entries:
            plain = WRAPPERS.sub("", name)
            if match := LORA.fullmatch(plain):
                if match["bias"]:
                    raise self.refused(f"{name}: a bias of an adapter is not supported")
                parts = pairs.setdefault((match["module"], match["inner"]), {})
                if match["kind"] in parts:
                    raise self.refused(f"{name} repeats {parts[match['kind']]}")
                parts |= {match["kind"]: name} | ({"embedding": name} if match["embedding"] else {})
            elif match := TOKENS.fullmatch(plain):
                self._tokens(name, match["module"])
            else:
                self._value(name, plain)
        if not pairs and not self.adapter.values and not self.adapter.rows:
            raise self.refused(f"{WEIGHTS} has no tensors")
        for (path, _), parts in pairs.items():
            if not {"A", "B"} <= parts.keys():
                raise self.refused(f"{next(iter(parts.values()))}: its other matrix is missing")
            self._pair(path, parts)

    def _pair(self, path: str, parts: dict[str, str]) -> None:
        """Find the weights that a pair of matrices changes."""
        a, b = (self.adapter.entries[parts[which]].shape for which in "AB")
        if len(a) != 2 or len(b) != 2:
            text = f"{parts['A']} is {list(a)} and {parts['B']} is {list(b)}, not matrices"
            raise self.refused(text, "save it again after its parts are gathered")
        short = canonical(path)
        if short.endswith(".experts"):
            self._stack(path, short, parts, a, b)
            return
        name = self.names.get(f"{short}.weight")
        if name is None or not self.adapter.tensors[name].shape[1:]:
            raise self.refused(f"{parts['A']} has no place; this model has no matrix {short}{self._tied_to(short)}")
        self._require_untied(name, parts["A"])
        tensor, embedding = self.adapter.tensors[name], "embedding" in parts
        out, width = tensor.shape[::-1] if tensor.turned or embedding else tensor.shape
        rank, scale = self._scale(path, a[0], parts["A"])
        if a != (rank, width) or b != (out, rank):
            self._misfits(parts, a, b, f"{name}, which has {width} inputs and {out} outputs")
        change = Change(parts["A"], parts["B"], rank, scale, parts.get("magnitude_vector", ""), exchanged=embedding)
        if change.magnitude and (tensor.turned or embedding):
            raise self.refused(f"{change.magnitude}: DoRA of {name} is not supported")
        self._put((name, None), change)

    def _stack(self, path: str, short: str, parts: dict[str, str], a: tuple[int, ...], b: tuple[int, ...]) -> None:
        """Find the experts' weights that a pair of matrices of all experts changes, by the shapes."""
        leaves, count = self._of_experts(short)
        if not leaves:
            raise self.refused(f"{parts['A']} has no place; this model has no experts {short}")
        if a[0] % count or a[0] != b[1]:
            self._misfits(parts, a, b, f"{count} experts")
        fits = []
        for leaf, (out, width, turned) in leaves.items():
            for exchanged in (False,) if turned else (False, True):
                if (a[1], b[0]) == ((out, width) if exchanged else (width, out)):
                    fits.append((leaf, exchanged))
        if len(fits) > 1:  # some shapes leave two possibilities, between which PEFT's version decides
            fits = [fit for fit in fits if fit[1] == self._exchanges()]
        if len(fits) != 1:
            self._misfits(parts, a, b, f"the experts {short}")
        leaf, exchanged = fits[0]
        rank, scale = self._scale(f"{path}.{leaf}_proj", a[0] // count, parts["A"])
        grouped = self._is_grouped(f"{leaf}_proj")
        for number in range(count):
            change = Change(
                parts["A"], parts["B"], rank, scale, "", number, count, exchanged=exchanged, grouped=grouped
            )
            stacked = self.names.get(f"{short}.{leaf}_proj")
            if stacked:
                self._put((stacked, number), change)
                continue
            for half, part in enumerate(("gate", "up")) if leaf == "gate_up" else ((None, leaf),):
                name = self.names[f"{short}.{number}.{part}.weight"]
                self._put((name, None), replace(change, half=half))

    def _of_experts(self, short: str) -> tuple[dict[str, tuple[int, int, bool]], int]:
        """Return outputs, inputs and orientation of transformers' parameters of these experts, and their number."""
        leaves: dict[str, tuple[int, int, bool]] = {}
        count = 0
        for leaf in ("gate_up", "up", "down"):
            if stacked := self.names.get(f"{short}.{leaf}_proj"):
                tensor = self.adapter.tensors[stacked]
                count = tensor.shape[0]
                out, width = tensor.shape[1:]
                leaves[leaf] = (width, out, True) if tensor.turned else (out, width, False)
            elif single := self.names.get(f"{short}.0.{leaf.removeprefix('gate_')}.weight"):
                tensor = self.adapter.tensors[single]
                gated = f"{short}.0.gate.weight" in self.names
                if (leaf == "gate_up" and not gated) or (leaf == "up" and gated):
                    continue
                count = tensor.experts
                leaves[leaf] = (tensor.shape[0] * (2 if leaf == "gate_up" else 1), tensor.shape[1], False)
        return leaves, count

    def _value(self, name: str, plain: str) -> None:
        """Find the released tensor that a saved module replaces."""
        short = canonical(SAVED.sub("", plain))
        released = self.names.get(short)
        if released is None:
            raise self.refused(f"{name} has no place; this model has no tensor {short}{self._tied_to(short)}")
        self._require_untied(released, name)
        shape, expected = self.adapter.entries[name].shape, self.adapter.tensors[released].shape
        if shape != expected:
            resized = " of another vocabulary" if shape[1:] == expected[1:] else ""
            raise self.refused(f"{name} is {list(shape)}{resized}, and {released} is {list(expected)}")
        self.adapter.values[released] = name

    def _tokens(self, name: str, path: str) -> None:
        """Find the rows that trained tokens replace."""
        released = self.names.get(f"{canonical(path)}.weight")
        indices = self.config.get("trainable_token_indices")
        if isinstance(indices, dict):
            indices = next((rows for layer, rows in indices.items() if f".{path}".endswith(f".{layer}")), None)
        entry = self.adapter.entries[name]
        if released is None or not isinstance(indices, list):
            raise self.refused(f"{name} has no place; {CONFIG} has no trainable_token_indices for it")
        rows, width = self.adapter.tensors[released].shape
        if entry.shape != (len(indices), width) or any(type(i) is not int or not 0 <= i < rows for i in indices):
            raise self.refused(
                f"{name} is {list(entry.shape)}, for {len(indices)} tokens of {released}, [{rows}, {width}]"
            )
        self.adapter.rows[released] = name, indices

    def _tied_to(self, short: str) -> str:
        return ": its output layer is its embedding, tie_word_embeddings" if "lm_head" in short and self.tied else ""

    def _require_untied(self, released: str, name: str) -> None:
        if released == self.embedding and self.tied:
            text = f"{name} changes the embedding alone, but this model has one matrix for embedding and output"
            raise self.refused(text, "untie them first: tie_word_embeddings false, and lm_head.weight in the weights")

    def _put(self, weight: Weight, change: Change) -> None:
        if weight in self.adapter.changes:
            raise self.refused(f"{change.a} and {self.adapter.changes[weight].a} both change {weight[0]}")
        self.adapter.changes[weight] = change

    def _misfits(self, parts: dict[str, str], a: tuple[int, ...], b: tuple[int, ...], of: str) -> None:
        raise self.refused(f"{parts['A']} is {list(a)} and {parts['B']} is {list(b)}, which do not fit {of}")

    def _scale(self, path: str, rank: int, name: str) -> tuple[int, float]:
        """Return rank and scale of a module, from the patterns of adapter_config.json."""
        path = BEGINNING.sub("", path) if path.startswith("base_model.") else path
        announced = self._of_pattern("rank_pattern", path, self.config.get("r"))
        alpha = self._of_pattern("alpha_pattern", path, self.config.get("lora_alpha"))
        if rank != announced or isinstance(alpha, bool) or not isinstance(alpha, int | float) or rank < 1:
            raise self.refused(f"{name} has rank {rank}, but {CONFIG} has rank {announced} and alpha {alpha}")
        return rank, alpha / (sqrt(rank) if self.config.get("use_rslora") else rank)

    def _of_pattern(self, key: str, path: str, default: Any) -> Any:
        """Return the value for a module by PEFT's rule: the first pattern that is the end of its name."""
        for pattern, value in (self.config.get(key) or {}).items():
            try:
                if re.match(rf"(.*\.)?({pattern.removeprefix('^')})$", path):
                    return value
            except re.error as error:
                raise self.refused(f"{CONFIG}: {key}: {pattern}: {error}") from None
        return default

    def _exchanges(self) -> bool:
        """Whether a version of PEFT wrote the file that exchanges A and B of experts. Only PEFT writes auto_mapping."""
        numbers = re.findall(r"\d+", str(self.config.get("peft_version") or ""))
        if len(numbers) < 2:
            return "auto_mapping" in self.config
        return tuple(map(int, numbers[:2])) < EXCHANGED_BEFORE

    def _is_grouped(self, parameter: str) -> bool:
        """Whether B of these experts has the columns of one expert after another, by the marks that Unsloth writes."""
        mapping = _object(self.config, "auto_mapping")
        for source in (self.config, mapping):
            of_parameters = _object(_object(source, "unsloth_fused_expert_lora"), "parameters")
            order = source.get("lora_B_layout")
            if of_parameters:
                order = _object(of_parameters, parameter).get("lora_B_layout", "rank_major")
            if order is not None and order not in ORDERS:
                raise self.refused(f"{CONFIG}: {parameter} has lora_B_layout {order}, which is not supported")
            if order is not None:
                return ORDERS[order]
        return bool(mapping.get("unsloth_fixed")) and self.model_type in GROUPED


def _object(source: dict[str, Any], key: str) -> dict[str, Any]:
    value = source.get(key)
    return value if isinstance(value, dict) else {}
