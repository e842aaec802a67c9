"""Sections of a run's YAML: every key with its type, default, limits and meaning. conf/schema/run.py joins them.

Models are strict ("1" is no integer, neither is 1.0 or true), closed (an unknown key is an error) and frozen.
"""

# pyright: reportArgumentType=false

from typing import Annotated, Any, Literal, TypeGuard, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_core import PydanticCustomError

from conf.schema.bearing import NOWHERE, bears, is_declared
from conf.schema.named import HERE, NODES_POOL, Engine, Network

COUNTED = 2**31 - 1  # what 32 bits count; a run of as many steps of as many rows still counts in 64
LONGEST = 255  # bytes of a file's name; file systems take no more

MOST = 2**16  # GPUs of a run
Degree = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=1, le=COUNTED)]
Number = Annotated[int, Field(ge=0, le=COUNTED)]
Seed = Annotated[int, Field(ge=1, lt=2**31)]  # Megatron refuses 0, and NumPy takes 32 bits


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise PydanticCustomError("nul", "holds a NUL, which no name and no line of text has")
    if not value.strip():
        raise PydanticCustomError("blank", "holds nothing but blanks")
    return value


def _is_path(value: str) -> str:
    """Check a path's length.

    No file system has a longer name, and pathlib raises for one instead of finding nothing.
    """
    if any(len(name.encode()) > LONGEST for name in value.split("/")) or len(value.encode()) >= 4096:
        raise PydanticCustomError("path", f"a name in it is longer than {LONGEST} bytes, or all of it than 4095")
    if value.startswith("~") and value[1:2] not in ("", "/"):
        raise PydanticCustomError("path", "of other users' folders no short form is taken; write the path out")
    return value


Text = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]
Place = Annotated[Text, AfterValidator(_is_path)]  # a path, or what may be one

AdapterTarget = Literal[
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    # multi-latent attention (DeepSeek-V3) has these in place of linear_qkv
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
]
AdapterTargets = tuple[AdapterTarget, ...]
ALL_LINEAR = "all-linear"  # PEFT's word
_LISTED = TypeAdapter(AdapterTargets)


def _one_of_both(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Report the problems of the list, which is what a faulty value was meant to be."""
    try:
        return validate(value)
    except ValidationError:
        if isinstance(value, str):
            text = f"neither {ALL_LINEAR} nor a list of {', '.join(get_args(AdapterTarget))}"
            raise PydanticCustomError("targets", text) from None
        return _LISTED.validate_python(value)


def _one_interval(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        text = "neither a number of steps nor epoch nor a share of all steps, from 1e-6 and below 1"
        raise PydanticCustomError("interval", text) from None


# Steps between two events of a training, a share of all its steps, or once an epoch (conf/rules/schedule.py)
Share = Annotated[float, Field(ge=1e-6, lt=1)]
Interval = Annotated[Literal["epoch"] | Count | Share, WrapValidator(_one_interval)]
IntervalOrNever = Annotated[Literal["epoch"] | Number | Share, WrapValidator(_one_interval)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Section(Strict):
    """Keys of a run, each of which declares beside its type whether it bears identity."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for key, field in cls.model_fields.items():
            if not is_declared(field) and not is_section(field.annotation):
                raise TypeError(
                    f"{cls.__name__}.{key}: does not say whether it bears identity (conf/schema/bearing.py)"
                )


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


class Adapter(Section):
    """The part of the model that is trained: a low-rank adapter, or every weight."""

    kind: Annotated[Literal["lora", "dora", "none"], bears("train")] = Field(
        default="lora", description="none = full fine-tuning"
    )
    rank: Annotated[Count, bears("train")] = Field(default=32, description="inner width of the adapter")
    alpha: Annotated[Count, bears("train")] = Field(
        default=32, description="the adapter's output is scaled by alpha / rank"
    )
    rslora: Annotated[bool, bears("train", absent=False)] = Field(
        default=False, description="scale by alpha / sqrt(rank) instead, so that high ranks learn as fast (rsLoRA)"
    )
    init: Annotated[Literal["xavier", "kaiming"], bears("train", absent="xavier")] = Field(
        default="xavier",
        description="how A is drawn (B starts at 0): xavier = normal, variance 2 / (inputs + rank), Megatron-Bridge's "
        "default; kaiming = uniform, variance 1 / (3 * inputs), PEFT's default: for recipes written for PEFT",
    )
    b_lr_ratio: Annotated[float, bears("train", absent=1.0)] = Field(
        default=1.0, ge=1e-3, le=1000, description="learning rate of B over that of A; LoRA+ takes 16"
    )
    dropout: Annotated[float, bears("train")] = Field(default=0.0, ge=0, lt=1, description="on the adapter's input")
    lean: Annotated[bool, NOWHERE] = Field(
        default=True,
        description="LoRA sends what is of its rank, not activations; false = Megatron-Bridge's layers; same function",
    )
    # strict=False lets a YAML list become a tuple; the names in it stay strict
    targets: Annotated[
        Annotated[Literal["all-linear"] | Annotated[AdapterTargets, Field(strict=False)], WrapValidator(_one_of_both)],
        bears("train"),
    ] = Field(
        default=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        description="Megatron's names of the layers that get an adapter; fc1 and fc2 include the experts; "
        "all-linear = all that the model has of them: attention, dense layers, experts and shared experts",
    )
    experts: Annotated[Literal["each", "shared"], bears("train")] = Field(
        default="each",
        description="each = one adapter per expert, which PEFT can load; shared = one for all experts of a layer: "
        "smaller; both are the same model at any layout",
    )

    @property
    def names(self) -> AdapterTargets:
        """Megatron's names of the layers that get an adapter. Those that a model lacks do not count."""
        return get_args(AdapterTarget) if self.targets == ALL_LINEAR else self.targets


class Layout(Section):
    """Processes and how the model is cut: tp * cp * pp * dp = etp * ep * pp * edp = nodes * gpus_per_node.

    conf/rules/layout.py has the rules.
    """

    nodes: Annotated[Degree, NOWHERE] = Field(default=1, description="hosts")
    gpus_per_node: Annotated[Degree, NOWHERE] = Field(
        default=1, description="processes per host: one per GPU, or gloo processes on a CPU"
    )
    tp: Annotated[Degree, bears(derived="prepare")] = Field(
        default=1, description="tensor parallel: cuts attention and dense layers; keep it within a host"
    )
    pp: Annotated[Degree, NOWHERE] = Field(
        default=1, description="pipeline parallel: cuts the stack of layers into stages"
    )
    vpp: Annotated[int | None, NOWHERE] = Field(
        default=None, ge=2, le=65536, description="stages per pipeline rank (interleaved schedule); null = 1"
    )
    cp: Annotated[Degree, bears(derived="prepare")] = Field(default=1, description="context parallel: cuts sequences")
    ep: Annotated[Degree, NOWHERE] = Field(
        default=1, description="expert parallel: spreads the experts; no factor of tp * cp * pp * dp"
    )
    etp: Annotated[Degree, NOWHERE] = Field(
        default=1, description="tensor parallel inside each expert; Megatron's own default would be tp"
    )
    sp: Annotated[bool, bears(derived="prepare")] = Field(
        default=False, description="sequence parallel: cuts other activations too; MoE with tp > 1 needs it"
    )
    first_stage_layers: Annotated[Count | None, NOWHERE] = Field(
        default=None, description="layers on the first pipeline rank; null = even"
    )
    last_stage_layers: Annotated[Count | None, NOWHERE] = Field(
        default=None, description="layers on the last pipeline rank; null = even"
    )
    auto: Annotated[bool, NOWHERE] = Field(
        default=False,
        description="the fastest layout of these nodes and gpus_per_node that fits is taken, with its micro_batch and "
        "recompute; what is written of those does not count. `layout: auto` = all GPUs of this host, or "
        "of one host of hardware.gpu where this has none or gang.engine is not local",
    )

    @property
    def world(self) -> int:
        """Number of processes of the run."""
        return self.nodes * self.gpus_per_node


class Hardware(Section):
    """The hardware that the run is planned for; never part of the run's identity."""

    gpu: Annotated[Place | None, NOWHERE] = Field(
        default=None,
        description="a100, h100, h200, b200, gb200, l4, a10, rtx4090, a6000, l40s, cpu, or a .yaml of your own "
        "(conf/planner/hardware.py); null = the one that the run's name holds, else cpu for tiny://KIND and h100 for "
        "any other model",
    )
    price: Annotated[float | None, NOWHERE] = Field(
        default=None,
        ge=0,
        le=10_000,
        description="USD per GPU and hour; null = the .yaml's, or about what renting one costs",
    )
    gate: Annotated[Literal["stop", "warn"], NOWHERE] = Field(
        default="stop", description="what a flow does whose plan does not fit; stop = before anything is downloaded"
    )


class Checkpoint(Section):
    """Checkpoints that are saved during training."""

    save_every: Annotated[Interval, bears(derived="train")] = Field(
        description="steps between checkpoints; below 1 = share of all steps; epoch = once an epoch; the last step is "
        "always saved; with keep_best another value is another training, as the best is one of these"
    )
    keep: Annotated[Count | None, bears("train", held=False)] = Field(
        default=None, description="newest complete checkpoints that stay; null = all"
    )
    keep_best: Annotated[bool, bears("train", absent=False, held=False)] = Field(
        default=False,
        description="the one with the lowest validation loss stays as well; export.checkpoint=best exports it",
    )
    save_optimizer: Annotated[bool, bears("train")] = Field(
        default=True, description="without it a run cannot resume where it was"
    )


class Log(Section):
    """Reports while training."""

    every: Annotated[Count, NOWHERE] = Field(default=1, description="steps between lines of metrics")
    layer_norms: Annotated[bool, NOWHERE] = Field(
        default=False, description="each line has the norm of every layer's gradient, too"
    )
    noise_scale: Annotated[bool, NOWHERE] = Field(
        default=False,
        description="and the gradient noise scale in tokens: larger batches pay up to about so many; needs two micro "
        "batches a step and rank, and a layout of tp and dp alone",
    )
    peak_tflops: Annotated[float | None, NOWHERE] = Field(
        default=None, ge=1e-3, le=10**6, description="per device, dense, for MFU; null = from the device's name"
    )
    profile_every: Annotated[int | None, NOWHERE] = Field(
        default=None,
        ge=2,
        description="steps between two that torch's profiler records, in paths.logs/profile/step-N; "
        "python -m trainer.profiling FOLDER reads them; null = none",
    )


class Evaluate(Section):
    """Evaluation of the base and the tuned model, which vLLM serves."""

    tasks: Annotated[tuple[Place, ...], bears("evaluate")] = Field(
        default=("held_out",),
        strict=False,
        description="held_out = the data's test split; else lm-eval's names, or paths of task files (YAML); "
        "empty = no evaluation, and no promotion",
    )
    base: Annotated[Literal["required", "optional"], NOWHERE] = Field(
        default="required",
        description="what becomes of a run whose base model cannot be evaluated: required = nothing is trained; "
        "optional = it is, and nothing is promoted",
    )
    rows: Annotated[Count | None, bears("evaluate")] = Field(default=200, description="rows per task; null = all")
    max_tokens: Annotated[Count, bears("evaluate")] = Field(
        default=256, description="longest answer to a held-out prompt"
    )
    samples: Annotated[Count, bears("evaluate")] = Field(
        default=20, description="rows per task in the table of prompts, answers and references"
    )
    precision: Annotated[Literal["fp32", "bf16"] | None, bears(derived="evaluate")] = Field(
        default=None, description="of serving; null = train.precision"
    )
    quantization: Annotated[Literal["fp8"] | None, bears("evaluate", absent=None)] = Field(
        default=None,
        description="fp8 = weights are rounded to it while they are loaded: half of bf16's bytes, other answers",
    )
    adapter: Annotated[Literal["merged", "unmerged"], bears(derived="evaluate")] = Field(
        default="merged",
        description="what of a trained adapter is served: merged = the whole exported model; "
        "unmerged = the released model with the exported adapter beside it",
    )
    nodes: Annotated[Degree | None, NOWHERE] = Field(
        default=None,
        description="hosts that serve one model, each a stage of vLLM's pipeline; null = the fewest that hold it",
    )
    gpus: Annotated[Degree | None, NOWHERE] = Field(
        default=None,
        description="GPUs of a host, vLLM's tensor parallel degree; null = the fewest that hold all questions at once, "
        "and without a plan all of the host",
    )
    engine: Annotated[Engine | None, NOWHERE] = Field(
        default=None,
        description="who starts it on hosts of its own; null = gang.engine where several serve or this host has no GPU",
    )
    pool: Annotated[Text | None, NOWHERE] = Field(
        default=None, description="for prefect: work pool with a worker per host; null = gang.pool"
    )
    expert_parallel: Annotated[bool | None, NOWHERE] = Field(
        default=None,
        description="spreads whole experts over these GPUs instead of a part of each; null = as the planner says",
    )
    eager: Annotated[bool | None, NOWHERE] = Field(
        default=None,
        description="neither compiles nor captures CUDA graphs: starts sooner, answers slower; "
        "null = where graphs save less time than they take",
    )
    parity_rows: Annotated[Number, bears("train", "evaluate", held=False)] = Field(
        default=8, description="prompts whose log-probabilities training and serving must agree on; 0 = none"
    )
    parity_bound: Annotated[float | None, bears("evaluate")] = Field(
        default=None,
        gt=0,
        le=1,
        description="mean difference, nats per token; null = 1e-3 where all is fp32, else 0.05",
    )
    seed: Annotated[Seed, bears("evaluate")] = Field(
        default=1234, description="of lm-eval's few-shot choices; answers are greedy"
    )


class Gang(Section):
    """Start, watch and restart of a run over several hosts; never part of the run's identity."""

    engine: Annotated[Engine, NOWHERE] = Field(
        default=HERE, description="who starts a process group per host; local = all of them on this one"
    )
    pool: Annotated[Text, NOWHERE] = Field(
        default=NODES_POOL, description="for prefect: work pool with one worker per host"
    )
    start_within: Annotated[float, NOWHERE] = Field(
        default=900, ge=0.1, le=10**6, description="seconds until all hosts are there, or are given back"
    )
    silent_after: Annotated[float, NOWHERE] = Field(
        default=12, ge=9, le=10**6, description="seconds of silence after which a host counts as gone"
    )
    stall_factor: Annotated[float, NOWHERE] = Field(
        default=10, ge=2, le=1000, description="a step may take so many times the usual one's time"
    )
    stall_seconds: Annotated[float, NOWHERE] = Field(
        default=120, ge=0.1, le=10**6, description="and at least so many seconds"
    )
    quiet_seconds: Annotated[float, NOWHERE] = Field(
        default=3600, ge=0.1, le=10**6, description="seconds that loading, validation or a save may take without a step"
    )
    retries: Annotated[Number, NOWHERE] = Field(
        default=3, description="new attempts after hosts failed; a later checkpoint starts the count again"
    )
    min_nodes: Annotated[Degree | None, NOWHERE] = Field(
        default=None, description="fewest hosts of training to go on with; null = layout.nodes"
    )
    grace: Annotated[int, NOWHERE] = (
        Field(  # told after 2 s, 8 to say what became of it: all is over before Prefect's worker kills, at 30
            default=20,
            ge=1,
            le=20,
            description="seconds that a training told to end has to save a checkpoint, on one host as on several",
        )
    )
    preflight: Annotated[bool, NOWHERE] = Field(
        default=True, description="measure hosts and network before the model is loaded"
    )
    network: Annotated[Network | None, NOWHERE] = Field(
        default=None, description="preset of conf/network.py for the network between hosts; null = none"
    )


class Promote(Section):
    """Promotion of the tuned model in MLflow's registry."""

    model: Annotated[Text, bears("promote")] = Field(
        default="{name}", description="registered model; {name} stands for the run's name"
    )
    metric: Annotated[Text, bears("promote")] = Field(
        default="held_out/exact_match",
        description="task/metric that decides; more is better, but of perplexity and bits per byte less",
    )
    margin: Annotated[float, bears("promote")] = Field(
        default=0.0, ge=0, description="the champion is replaced by what beats it by more than this"
    )
    confidence: Annotated[float, bears("promote", absent=0.0)] = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="how sure a gain over the base and the champion has to be, by a paired test of the rows: 0.95 = "
        "equal models gain as much in 5 % of cases at most; 0 = promote.margin alone decides",
    )


class Track(Section):
    """Destination of metrics. The server is MLFLOW_TRACKING_URI's, or a file in runs/."""

    experiment: Annotated[Text, NOWHERE] = Field(default="finetune", description="MLflow's experiment")
    wandb: Annotated[Text | None, NOWHERE] = Field(
        default=None, description="Weights & Biases project that gets the metrics too"
    )
    tensorboard: Annotated[bool, NOWHERE] = Field(
        default=False, description="training writes TensorBoard's files too, into tensorboard/ of its artifact"
    )


class Paths(Section):
    """Places of this run's files; never part of the run's identity. {name} stands for the run's name."""

    model: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/model", description="released checkpoint, Hugging Face format"
    )
    base: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/base", description="the same, converted to Megatron's torch_dist format"
    )
    data: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/data", description="training.jsonl and validation.jsonl"
    )
    reference: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/reference", description="what another model says of the prepared rows, for dpo and distill"
    )
    teacher: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/teacher", description="released checkpoint of train.teacher"
    )
    teacher_base: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/teacher-base", description="the same, converted"
    )
    output: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/output", description="checkpoints and metrics of this run"
    )
    logs: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/logs", description="what Megatron prints, a file per rank"
    )
    export: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/export", description="the trained model in Hugging Face's formats"
    )
    served: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/export/merged", description="the model that is evaluated"
    )
    prompts: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/prompts", description="prepared rows of reinforce.source"
    )
    reinforced: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/reinforced", description="checkpoints, samples and metrics of reinforcement learning"
    )
    parity: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/output/parity.json", description="what training says of fixed prompts"
    )
    evaluation: Annotated[Place, NOWHERE] = Field(default="runs/{name}/evaluation", description="scores and answers")
    of_base: Annotated[Place, NOWHERE] = Field(
        default="runs/{name}/evaluation-base", description="those of the base; for evaluate.quantization and model.base"
    )
    kernels: Annotated[Place, NOWHERE] = Field(
        default="runs/kernels", description="what torch and vLLM compile on GPUs, kept between starts"
    )

    @field_validator("*", mode="before")
    @classmethod
    def null_is_the_default(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        return cls.model_fields[info.field_name].default if value is None else value
