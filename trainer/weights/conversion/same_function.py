"""Check that layers of a converted base compute the same function as transformers' layers, on the same tokens.

Checksums and coverage prove that every tensor exists. They do not prove that Megatron uses it correctly: it might swap
queries and keys, use another kind of norm or another base of the rotary embedding, or leave out a router's bias.
Therefore the first layers are computed twice in fp32: by transformers from the released tensors, and by Megatron from
the files of the base. The number of layers is the smallest that includes every kind of layer. transformers builds no
layers for multi-token prediction, so one is assembled from transformers' parts as DeepSeek-V3's report describes. Only
a few hundred rows of the vocabulary are used.

The check compares the logits, and the difference between output and input of each layer. The measure is the norm of the
deviation relative to the norm of transformers' values. If a token has almost equal weights for two experts, rounding
may swap them. Therefore the row of tokens with the largest deviation is ignored.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

import contextlib
import gc
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from conf import families, model_facts
from conf.families.parts.tensors import ROOT
from conf.model_facts import ModelFacts, by_layer, facts_from_hf, first_layers
from conf.model_files import config_json
from conf.model_files.weights import LAYER, layer_of
from conf.schema.run import Layout, Run
from contract.amounts import unlike
from contract.faults import Fault
from trainer.megatron.model import make_provider, open_bridge, trusted
from trainer.weights import atomic_folder, coverage, released, released_tensors, torch_dist
from trainer.weights.conversion import unwritten
from trainer.weights.mapping import released_names

BOUND = 1e-4  # correct layers differ by 2e-6; with queries and keys swapped, by at least 0.1
ROWS, LENGTH = 4, 64  # of the tokens
VOCABULARY = 256  # rows of the embedding that are used
# Tensors with a row for each token, and the keys of config.json for the number of rows.
EMBEDDINGS = ("embed_tokens.weight", "embed_tokens_per_layer.weight", "wte.weight", "lm_head.weight")
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
LOGITS = "the logits"
SKIP = "model.compare=false converts it without a comparison"
SPARE = 1.2  # factor on the memory that the layers need
PLENTY = 5e8  # bytes; limit of the memory, unless the smallest possible number of experts needs more
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")  # names of the key in config.json, by family
EXPERT = re.compile(r"\.experts\.(\d+)\.")
OF_ALL_EXPERTS = re.compile(r"\.((gate|router|experts)\.|e_score_correction_bias$)")  # with a row for each expert
BLOCK_AHEAD = re.compile(r"layers\.(\d)\.")  # a further block of an MTP layer, which is another layer of transformers
MEGATRON_EXPERT = re.compile(r"(.+\.experts\..+\.(?:weight|bias))(\d+)$")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
Added = dict[str, torch.Tensor]  # by the layer's released name, each [row, token, ...]


@dataclass(frozen=True)
class Cut:
    """The first layers of a model, with a part of its vocabulary."""

    run: Run  # of one process, in fp32
    model: released.Model
    config: dict[str, Any]
    facts: ModelFacts  # of the whole model
    layers: int
    mtp: bool  # whether the base has the first layer of multi-token prediction
    rows: torch.Tensor  # of the vocabulary
    tokens: torch.Tensor
    experts: tuple[int, ...]  # numbers of the experts that are compared in each layer

    def name(self, layer: int) -> str:
        stem = next(match[1] for match in map(LAYER.match, self.model.weights) if match)
        return f"{stem}.{layer}"

    @property
    def mtp_name(self) -> str:
        ahead = families.of(self.model.config).ahead
        return f"{ahead}layers.0" if ahead else self.name(self.facts.layers)


def compare(run: Run, checkpoint: Path, is_new: bool = False) -> dict[str, float]:
    """Return the differences by the layer's released name, on every rank. Raise a Fault if one is above BOUND.

    Two ranks of the first host share the work. `is_new`: this command has just written the checkpoint.
    """
    cut, stored = cut_down(run), replace(unwritten.open_base(run, checkpoint), is_new=is_new)
    expected: Added = {}
    actual: Added = {}
    rank, second = atomic_folder.rank(), min(1, int(os.environ["LOCAL_WORLD_SIZE"]) - 1)
    with torch.no_grad(), _folder(cut) as folder:
        if rank == second:
            expected = _by_transformers(cut, folder, _types(stored, open_bridge(run)))
            gc.collect()
        if rank == 0:
            run_of_layers = cut.run.changed(paths={"model": str(folder)})
            actual = _by_megatron(cut, make_provider(run_of_layers, open_bridge(run_of_layers)), stored)
    every = atomic_folder.gather((expected, actual))
    expected, actual = every[second][0], every[0][1]
    differences = {name: difference(expected[name], actual[name]) for name in expected}
    for name, value in differences.items():
        if not value <= BOUND:
            kind = "multi-token prediction" if cut.mtp and name == cut.mtp_name else _kind(cut, name)
            raise Fault(
                f"{cut.model.folder}: {name} ({kind}): Megatron does not compute the same function of these weights as "
                f"transformers: the results for the same tokens differ by {value:.2%}, but rounding causes less than "
                f"{BOUND:.2%}; training would change another model. {SKIP}"
            )
    return differences


def cut_down(run: Run) -> Cut:
    """Return the first layers of the run's model, as few as include every kind of layer."""
    model = released.read(Path(run.paths.model))
    facts = facts_from_hf(model.config)
    lists = by_layer(model.config)
    turns = families.of(model.config).layer_turns or [""]
    kinds = [
        (kind, turns[layer % len(turns)], *(str(each[layer]) for each in lists.values()))
        for layer, kind in enumerate(facts.kinds)
    ]
    layers, mtp = 1 + max(kinds.index(kind) for kind in set(kinds)), bool(run.model.mtp and facts.mtp_layers)
    # An MTP layer's block is a layer like the last one, and some models have another last layer.
    while (mtp and kinds[layers - 1] != kinds[-1]) or not _begins(model.config, layers, facts):
        layers += 1
    experts, count = _experts(model, facts, layers, mtp), min(VOCABULARY, facts.vocab)
    config = first_layers(model.config, layers) | dict.fromkeys(TOKENS) | {"dtype": "float32"}
    config |= {key: count for key in VOCABULARIES if key in config}
    config.pop("quantization_config", None)
    config |= {key: len(experts) for key in EXPERTS if facts.experts and config.get(key) == facts.experts}
    if facts.mtp_layers:
        config[families.of(model.config).key("num_nextn_predict_layers")] = int(mtp)
    train = {"precision": "fp32", "fp8": None, "fp8_weights": False, "recompute": "none"}
    moe = {"grouped_gemm": True, "dispatcher": "alltoall", "force_balance": False}
    changed = run.model_copy(update={"layout": Layout()}).changed(train=train, moe=moe)
    length = min(LENGTH, facts.positions or LENGTH)
    tokens = torch.randint(count, (ROWS, length), generator=torch.Generator().manual_seed(1))
    rows = torch.linspace(0, facts.vocab - 1, count).long()
    return Cut(changed, model, families.as_text(config), facts, layers, mtp, rows, tokens, experts)


def _begins(config: dict[str, Any], layers: int, facts: ModelFacts) -> bool:
    of_mtp = families.of(config).key("num_nextn_predict_layers")
    return facts_from_hf(first_layers(config, layers) | {of_mtp: 0}).kinds == facts.kinds[:layers]


def _experts(model: released.Model, facts: ModelFacts, layers: int, mtp: bool) -> tuple[int, ...]:
    """Return the numbers of the experts to compare, evenly spaced, and as many as fit into little memory."""
    needed = _taken(model, layers, mtp)
    taken = [(name, math.prod(model.weights[name].shape)) for name in needed]
    of_experts = sum(size for name, size in taken if ".experts." in name)
    rest = sum(size for name, size in taken if needed[name][0] is not None) - of_experts
    groups, free, need = model.config.get("n_group") or 1, available(), 0.0
    for count in (facts.experts // parts for parts in (1, 2, 4, 8, 16, 32)):
        need = 4 * SPARE * (rest + (of_experts * count / facts.experts if facts.experts else 0))
        fewest = not facts.experts or count // 2 < 2 * facts.top_k or count % (2 * groups)
        if need <= (free if fewest else min(free, PLENTY)):
            return tuple(index * facts.experts // count for index in range(count))
        if fewest:
            break
    memory, left = unlike(int(need), free)
    text = f"comparing its first {layers} layers with transformers' takes {memory} of memory, but {left} are free"
    raise Fault(f"{model.folder}: {text}. {SKIP}")


def available() -> int:
    """Return the bytes of memory that this process could still allocate."""
    return psutil.virtual_memory().available


def _taken(model: released.Model, layers: int, mtp: bool) -> dict[str, tuple[int | None, str]]:
    """Return the tensors to compare by name: the number of the layer, and an MTP layer's name as in DeepSeek-V3."""
    of_mtp, left_out = released.of_mtp(model), released.repeated(model).keys() | released.copied(model)
    places = {name: of_mtp.get(name, (layer_of(name), "")) for name in model.weights if name not in left_out}
    wanted = (None, *range(layers), *released.mtp_layers(model)[: int(mtp)])
    return {name: place for name, place in places.items() if place[0] in wanted and not released.COMPUTED.search(name)}


def difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the second largest of the rows' relative differences."""
    rows = (actual - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return float(rows.nan_to_num(nan=torch.inf).sort().values[-2])


def _kind(cut: Cut, name: str) -> str:
    return "all layers before them agree" if name == LOGITS else cut.facts.kinds[int(name.rpartition(".")[2])]


@contextlib.contextmanager
def _folder(cut: Cut) -> Iterator[Path]:
    """Yield a temporary folder with the cut config.json and, if it is trusted, the release's own code."""
    with tempfile.TemporaryDirectory(prefix="layers-") as name:
        folder = Path(name)
        (folder / config_json.NAME).write_text(json.dumps(cut.config))
        for file in cut.model.folder.glob("*.py") if cut.run.model.trust_remote_code else ():
            shutil.copy(file, folder)
        yield folder


def _types(stored: torch_dist.Stored, bridge) -> dict[str, torch.dtype]:
    """Return the type of each tensor of the base, by the names of the released tensors from which it is made."""
    registry = bridge._model_bridge.mapping_registry()
    types: dict[str, torch.dtype] = {}
    for name, place in stored.weights.items():
        if mapping := registry.megatron_to_hf_lookup(name):
            types |= dict.fromkeys(released_names(mapping), place.dtype)
    return types


def _by_transformers(cut: Cut, folder: Path, types: dict[str, torch.dtype]) -> Added:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.utils import logging

    logging.disable_progress_bar()
    own = trusted(cut.run, cut.config)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=own)
    with no_init_weights():  # touches no memory
        kind = type(AutoModelForCausalLM.from_config(config, trust_remote_code=own))
    weights, of_mtp = _weights(cut, types)
    kinds = {key: getattr(config, key, None) for key in config_json.PER_LAYER if cut.mtp}
    kinds = {key: of_layers for key, of_layers in kinds.items() if isinstance(of_layers, list)}
    if cut.mtp:
        config.num_hidden_layers += 1
        for key, of_layers in kinds.items():
            setattr(config, key, of_layers + (getattr(config, "mtp_layers_block_type", None) or of_layers[-1:]))
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    with _made_on_cpu(kind):
        model, loaded = kind.from_pretrained(None, config=config, state_dict=weights, **options)
    lost = sorted({*loaded["missing_keys"], *loaded["unexpected_keys"], *map(str, loaded["mismatched_keys"])})
    if lost:
        names = released.enumerate_names(lost)
        raise Fault(f"{cut.model.folder}: transformers' {kind.__name__} does not fit the tensors: {names}. {SKIP}")
    decoder, added = model.eval().get_decoder(), {}
    blocks = getattr(decoder, families.of(cut.config).layers_in)
    if cut.mtp:
        decoder.layers = blocks[: cut.layers]
    for number, layer in enumerate(blocks[: cut.layers]):
        layer.register_forward_hook(_hook(added, cut.name(number)), with_kwargs=True)
    last: Added = {}
    keep = decoder.register_forward_hook(lambda _module, _args, output: last.update(hidden=output.last_hidden_state))
    logits = model(input_ids=cut.tokens, use_cache=False).logits
    keep.remove()
    if cut.mtp:
        last_norm = families.of(cut.config).ends(cut.facts)[1][0].name.removeprefix(ROOT).removesuffix(".weight")
        norm = type(getattr(decoder, last_norm))
        embedded = model.get_input_embeddings()(cut.tokens.roll(-1, 1))  # of the next token
        parts = (
            _norm(norm, config, of_mtp["enorm.weight"])(embedded),
            _norm(norm, config, of_mtp["hnorm.weight"])(last["hidden"]),
        )
        decoder.layers = blocks[cut.layers :]
        for key in kinds:  # transformers chooses the mask by the layer's place
            setattr(decoder.config, key, kinds[key][-1:])
        setattr(decoder, last_norm, _norm(norm, config, of_mtp["shared_head.norm.weight"]))
        mixed = torch.nn.functional.linear(torch.cat(parts, -1), of_mtp["eh_proj.weight"])
        # The last token has no next token.
        added[cut.mtp_name] = decoder(inputs_embeds=mixed, use_cache=False).last_hidden_state[:, :-1]
    return added | {LOGITS: logits}


@contextlib.contextmanager
def _made_on_cpu(kind) -> Iterator[None]:
    """Make from_pretrained() create its model on the CPU, in memory that is not touched before the weights replace it.

    Otherwise it creates the model on "meta", where torch computes initial values in Python and imports its compiler.
    """
    from transformers.initialization import no_init_weights

    contexts = kind.get_init_context

    def on_cpu(*args, **kwargs) -> list:
        return [c for c in contexts(*args, **kwargs) if not isinstance(c, torch.device)] + [no_init_weights()]

    with mock.patch.object(kind, "get_init_context", on_cpu):
        yield


def _norm(kind, config, weight: torch.Tensor):
    norm = kind(len(weight), eps=getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon)
    norm.weight.copy_(weight)
    return norm


def _weights(cut: Cut, types: dict[str, torch.dtype]) -> tuple[Added, Added]:
    """Return released tensors with the base's rounding, in fp32: tensors of the model, and the extra ones of MTP."""
    weights: Added = {}
    of_mtp: Added = {}
    family = families.of(cut.model.config)
    root, embeddings = family.root(cut.model.weights), (*EMBEDDINGS, family.embedded(cut.model.weights))
    shapes = model_facts.shapes(cut.config, cut.model.weights)
    for released_name, (_, part) in _taken(cut.model, cut.layers, cut.mtp).items():
        expert = EXPERT.search(released_name)
        block = BLOCK_AHEAD.match(part)
        number, within = (int(block[1]), part[block.end() :]) if block else (0, part)
        name = f"{cut.name(cut.layers + number)}.{within}" if part else released_name
        if expert and int(expert[1]) not in cut.experts:
            continue
        tensor = released_tensors.read(cut.model, released_name)
        if name.endswith(embeddings):
            tensor = tensor[cut.rows]
        elif expert:
            name = EXPERT.sub(f".experts.{cut.experts.index(int(expert[1]))}.", name)
        elif OF_ALL_EXPERTS.search(name) and len(tensor) == cut.facts.experts:
            tensor = tensor[[*cut.experts]]
        tensor = tensor[tuple(map(slice, shapes.get(released_name, ())))]  # some have rows or columns of each layer
        tensor = tensor.to(types.get(released_name, tensor.dtype)).float()
        if part.startswith(("enorm.", "hnorm.", "shared_head.", "eh_proj.")):
            of_mtp[part] = tensor
        else:
            weights[f"{family.roots[-1]}{name.removeprefix(root)}" if name.startswith(root) else name] = tensor
    return weights, of_mtp


def _by_megatron(cut: Cut, provider, stored: torch_dist.Stored) -> Added:
    from megatron.core import parallel_state

    provider.perform_initialization = False
    provider.finalize()
    if not parallel_state.model_parallel_is_initialized():
        provider.initialize_model_parallel(seed=cut.run.train.seed)
    chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    _fill(cut, chunks, stored)
    model, added = chunks[0].eval(), {}
    for number, layer in enumerate(coverage.unwrap_model(chunks)[0].decoder.layers):
        layer.register_forward_hook(_hook(added, cut.name(number), turned=True), with_kwargs=True)
    if cut.mtp:

        def keep(_module, _args, output) -> None:
            added[cut.mtp_name] = output[0].transpose(0, 1)[:, :-1]

        coverage.unwrap_model(chunks)[0].mtp.layers[0].register_forward_hook(keep)
    logits = model(cut.tokens, torch.arange(cut.tokens.shape[1]).expand_as(cut.tokens), None)
    return added | {LOGITS: logits.float()[..., : len(cut.rows)]}


def _fill(cut: Cut, chunks, stored: torch_dist.Stored) -> None:
    """Fill the model with the base's weights, one at a time."""
    for name, tensor in coverage.named_tensors(chunks):
        if tensor.numel() == 0:
            continue
        if expert := MEGATRON_EXPERT.match(name):
            name = f"{expert[1]}{cut.experts[int(expert[2])]}"
        place = stored.weights.get(name) or stored.weights.get(name.replace(".mtp_model_layer.", ".transformer_layer."))
        if place is None:
            raise Fault(f"{stored.folder}: holds no {name}")
        if name in coverage.VOCABULARY:
            some = torch_dist.some_rows(stored, place.name, cut.rows.tolist())
            tensor.data.zero_()
            tensor.data[: len(cut.rows)] = some[:, : tensor.shape[1]]
        else:
            whole = torch_dist.read(stored, place)
            of_experts = len(whole) == cut.facts.experts and len(tensor) == len(cut.experts)  # and not of as many heads
            some = whole[[*cut.experts]] if of_experts else whole
            tensor.data.copy_(some[tuple(map(slice, tensor.shape))])


def _hook(added: Added, name: str, turned: bool = False):
    """Return a hook that stores a layer's output minus its input. `turned`: both are [token, row], as in Megatron."""

    def hook(_module, args, kwargs, output) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output if isinstance(output, torch.Tensor) else output[0]
        added[name] = (after - before).transpose(0, 1) if turned else after - before

    return hook
