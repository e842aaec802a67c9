"""Keys without a place in the trained model's fingerprint do not change it: each is changed, and tiny models trained.

Every key that identity declares without effect is in CHANGES, or in a section of NOT_READ, whose keys are all changed
at once. Models are a dense one, one of experts that are balanced strongly, and the same over packed rows.
"""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file

from conf.overrides import from_overrides
from conf.schema import bearing
from conf.schema.run import Run, sections

MADE = {"download", "prepare", "source", "convert", "reference", "train", "export"}
BOUND = 1e-3  # of what training has moved a tensor by
SHARED = ("train.steps=3", "optimizer.lr=1e-3", "optimizer.warmup_steps=0", "data.seq_length=128")
BALANCED = ("moe.aux_loss_coeff=0.5", "moe.z_loss_coeff=0.01", "train.seed=7")
MODELS = {
    "dense": ("llama", ()),
    "experts": ("glm4-moe-mtp", (*BALANCED, "moe.balance=aux_loss")),
    "packed": ("glm4-moe-mtp", (*BALANCED, "data.packed=true")),
}
TWO = "layout.gpus_per_node=2"
# Several keys at once, as every run takes seconds.
CHANGES = {
    "dense experts packed": [
        f"{TWO} adapter.lean=false train.verify_every=1 train.repeat_every=2",
        "layout.nodes=2 layout.auto=true optimizer.distributed=false",
        f"{TWO} layout.tp=2 layout.sp=true data.processes=2",
        f"{TWO} layout.pp=2 layout.first_stage_layers=1 train.recompute=full train.recompute_first=2",
        f"{TWO} layout.pp=2 layout.last_stage_layers=1 train.recompute=selective train.recompute_modules=[layernorm]",
        f"{TWO} layout.pp=2 layout.vpp=2 train.cuda_graphs=true train.overlap_tp=true",  # both on GPUs alone
        f"{TWO} layout.cp=2 checkpoint.save_every=1 export.every=1 model.ignore_config=[other]",
        "train.micro_batch=1 checkpoint.background=false",
        "train.micro_batch=4 log.packing_cost=true",
        "log.every=2 log.layer_norms=true log.noise_scale=true log.peak_tflops=1.0 log.profile_every=2",
    ],
    "dense": ["train.recompute=full train.recompute_layers=2"],
    "experts packed": [
        f"{TWO} layout.ep=2 moe.dispatcher=allgather",
        f"{TWO} layout.tp=2 layout.sp=true layout.etp=2",
        "train.recompute=selective train.recompute_modules=[moe,shared_experts]",
    ],
}
ALL = [(model, change) for models, changes in CHANGES.items() for model in models.split() for change in changes]
# What the default run tries: several keys at once.
FAST = [
    ("experts", "train.micro_batch=1 train.recompute=full optimizer.distributed=false adapter.lean=false"),
    ("packed", f"{TWO} layout.cp=2 train.micro_batch=1 log.every=2 checkpoint.save_every=1 train.verify_every=0"),
]
NOT_READ = ("hardware", "reinforce", "evaluate", "gang", "slurm", "kubernetes", "promote", "track", "paths")
OF_CONVERSION = {"model.compare", "convert.hosts"}
# Adam on the host rounds otherwise: tests/trainer/megatron/test_precision.py compares it. Loader processes need a GPU.
# max_loss judges an evaluation.
TEXTS = (
    "http://127.0.0.1:9/v1",
    "slurm",
    "other",
    "none",
    "8Gi",
    "8",
    "a=b",
    "a=8",
    "--other",
)  # one of which has the pattern of any text
ELSEWHERE = {"optimizer.offload", "data.workers", "export.max_loss"}


def unchanging() -> set[str]:
    """Keys without a place in any fingerprint up to that of the export, directly or derived."""
    declared = {
        f"{section}.{key}": bearing.of(field)
        for section, kind in sections().items()
        for key, field in kind.model_fields.items()
    }
    found = {key for key, one in declared.items() if not one.stages & MADE and one.derived not in MADE}
    return found | {
        "layout.tp",
        "layout.cp",
        "layout.sp",
        "checkpoint.save_every",
    }  # prepare and train derive from them


def test_every_key_without_effect_is_tried():
    tried = {pair.partition("=")[0] for _, change in ALL for pair in change.split()}
    assert {key for key in unchanging() if key.partition(".")[0] not in NOT_READ} == tried | OF_CONVERSION | ELSEWHERE


@pytest.fixture(scope="module")
def exported(configure, ranks, base, work):
    """exported(model, change, edit) -> tensors of the merged model and of the adapter, trained with that change."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def exported(model: str, change: str, edit: Callable[[Run], Run] = lambda run: run) -> dict[str, Any]:
        if (model, change) not in known:
            kind, keys = MODELS[model]
            base(kind)
            folder = work / f"{model}-{len(known)}"
            paths = (f"paths.output={folder}/output", f"paths.export={folder}/export")
            run = edit(with_keys(configure(kind, *paths, *SHARED, *keys), change))
            for command in "train", "export":
                done = ranks(command, run)
                assert done.code == 0, done.output[-3000:]
            known[model, change] = tensors(Path(run.paths.export))
            shutil.rmtree(folder, ignore_errors=True)  # not there with other paths
        return known[model, change]

    return exported


@pytest.fixture(scope="module")
def require_unchanged(exported, configure):
    """require_unchanged(model, change, edit): the export is that of the unchanged run, except for rounding."""

    def require_unchanged(model: str, change: str, edit: Callable[[Run], Run] = lambda run: run) -> None:
        found = exported(model, change, edit)
        expected = exported(model, "")
        released = tensors(Path(configure(MODELS[model][0]).paths.model))
        released = {f"merged/{name.partition('/')[2]}": tensor for name, tensor in released.items()}
        assert found.keys() == expected.keys()
        moved = {name: float((tensor - released.get(name, 0)).norm()) for name, tensor in expected.items()}
        apart = {name: float((found[name] - tensor).norm()) for name, tensor in expected.items()}
        assert {name: apart[name] / (moved[name] or 1e-30) for name in apart if apart[name] > BOUND * moved[name]} == {}
        assert sum(map(bool, moved.values())) > 10

    return require_unchanged


def with_keys(run: Run, change: str) -> Run:
    """The run with other values, each of its key's type, whatever rules between keys say of them on a CPU."""
    for section, values in from_overrides(change.split()).items():
        before = getattr(run, section)
        run = run.model_copy(update={section: type(before).model_validate(before.model_dump() | values)})
    return run


def tensors(folder: Path) -> dict[str, Any]:
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        found |= {f"{file.parent.name}/{name}": tensor.double() for name, tensor in load_file(file).items()}
    return found


@pytest.mark.parametrize("model, change", FAST)
def test_keys_without_effect_leave_the_trained_model_alone(model, change, require_unchanged):
    require_unchanged(model, change)


@pytest.mark.slow
@pytest.mark.parametrize("model, change", ALL)
def test_a_key_without_effect_leaves_the_trained_model_alone(model, change, require_unchanged):
    require_unchanged(model, change)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_sections_that_training_does_not_read_leave_it_alone(model, require_unchanged, work):
    changed = {key for key in unchanging() if key.partition(".")[0] in NOT_READ}

    def edit(run: Run) -> Run:
        for section in NOT_READ:
            keys = [key.partition(".")[2] for key in sorted(changed) if key.startswith(f"{section}.")]
            values = {key: another(run, section, key, work / f"{model}-elsewhere") for key in keys}
            run = run.model_copy(update={section: getattr(run, section).model_copy(update=values)})
        return run

    require_unchanged(model, "train.stop_after=3", edit)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_how_a_base_is_converted_leaves_the_trained_model_alone(model, require_unchanged, ranks, work):
    def edit(run: Run) -> Run:
        paths = run.paths.model_copy(update={"base": str(work / f"{model}-converted")})
        convert, source = (
            run.convert.model_copy(update={"hosts": "all"}),
            run.model.model_copy(update={"compare": True}),
        )
        run = run.model_copy(update={"paths": paths, "convert": convert, "model": source})
        done = ranks("convert", run)
        assert done.code == 0, done.output[-3000:]
        return run

    require_unchanged(model, "train.validate_batches=9", edit)


def another(run: Run, section: str, key: str, folder: Path) -> Any:
    """Another value of the key's type; of a place a copy of what lies there, or a folder of the same use."""
    value, field = getattr(getattr(run, section), key), sections()[section].model_fields[key]
    if section == "paths":
        place = folder / key
        if Path(value).is_dir() and not place.exists():
            shutil.copytree(value, place)
        return str(place)
    kind = TypeAdapter(Annotated[field.annotation, *field.metadata])  # pyright: ignore[reportInvalidTypeForm]
    literals = get_args(field.annotation)
    number = value if isinstance(value, int | float) else 1
    numbers = (not value, number + 1, number - 1, number / 2)
    for other in (*_flat(literals), *numbers, *TEXTS, *((text,) for text in TEXTS)):
        try:
            made = kind.validate_python(other)
        except ValidationError:
            continue
        if made is not None and made != value:
            return made
    raise AssertionError(f"{section}.{key}: no other value than {value!r}")


def _flat(values: tuple) -> list:
    return list(itertools.chain.from_iterable(_flat(get_args(one)) if get_args(one) else [one] for one in values))
