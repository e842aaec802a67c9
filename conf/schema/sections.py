"""Sections of a run's YAML: every key with its type, default, limits and meaning. conf/schema/run.py joins them.

Models are strict ("1", 1.0 and true are not integers), closed (an unknown key is an error) and frozen.
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

COUNTED = 2**31 - 1  # largest signed 32-bit integer; the product of two such counts fits into 64 bits
LONGEST = 255  # bytes of a file's name, the limit of file systems

MOST = 2**16  # GPUs of a run
Degree = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=1, le=COUNTED)]
Number = Annotated[int, Field(ge=0, le=COUNTED)]
Seed = Annotated[int, Field(ge=1, lt=2**31)]  # Megatron refuses 0, and NumPy's seeds have 32 bits


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise PydanticCustomError("nul", "contains a NUL character")
    if not value.strip():
        raise PydanticCustomError("blank", "contains only blanks")
    return value


def _is_path(value: str) -> str:
    """Check a path's length, as pathlib raises an error for names that no file system supports."""
    if any(len(name.encode()) > LONGEST for name in value.split("/")) or len(value.encode()) >= 4096:
        raise PydanticCustomError("path", f"a name in it is longer than {LONGEST} bytes, or all of it than 4095")
    if value.startswith("~") and value[1:2] not in ("", "/"):
        raise PydanticCustomError("path", "~USER is not supported; write the full path")
    return value


Text = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]
Place = Annotated[Text, AfterValidator(_is_path)]  # a path, or a name that may be one

AdapterTarget = Literal[
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    # multi-latent attention (DeepSeek-V3) has these instead of linear_qkv
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    # gated delta nets (Qwen3-Next, Qwen3.5) and Mamba layers have these instead of linear_qkv and linear_proj
    "in_proj",
    "out_proj",
    # around routed experts that see narrower tokens
    "fc1_latent_proj",
    "fc2_latent_proj",
]
AdapterTargets = tuple[AdapterTarget, ...]
ALL_LINEAR = "all-linear"  # PEFT's term
_LISTED = TypeAdapter(AdapterTargets)


def _one_of_both(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Report the problems of a list, or one problem for a text."""
    try:
        return validate(value)
    except ValidationError:
        if isinstance(value, str):
            text = f"must be {ALL_LINEAR} or a list of {', '.join(get_args(AdapterTarget))}"
            raise PydanticCustomError("targets", text) from None
        return _LISTED.validate_python(value)


def one_problem(kind: str, text: str) -> WrapValidator:
    """Report one problem for a union. Pydantic reports each alternative, under an internal name."""

    def validated(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError(kind, text) from None

    return WrapValidator(validated)


# Steps between two events of a training, a share of all its steps, or once per epoch (conf/rules/schedule.py)
Share = Annotated[float, Field(ge=1e-6, lt=1)]
_one_interval = one_problem(
    "interval", "must be a number of steps, epoch, or a share of all steps, from 1e-6 and below 1"
)
Interval = Annotated[Literal["epoch"] | Count | Share, _one_interval]
IntervalOrNever = Annotated[Literal["epoch"] | Number | Share, _one_interval]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


def _join_lines(schema: dict[str, Any]) -> None:
    """Write each description on one line."""
    for entry in schema["properties"].values():
        if "description" in entry:
            entry["description"] = " ".join(entry["description"].split())


class Section(Strict):
    """Keys of a run. Each key declares next to its type whether it counts for identity; a string after it describes it.

    The descriptions become part of conf/schema.json, docs/reference/keys.md and the forms of deployments.
    """

    model_config = ConfigDict(use_attribute_docstrings=True, json_schema_extra=_join_lines)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for key, field in cls.model_fields.items():
            if not is_declared(field) and not is_section(field.annotation):
                raise TypeError(f"{cls.__name__}.{key}: has no declaration of identity (conf/schema/bearing.py)")


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


class Adapter(Section):
    """The trained part of the model: a low-rank adapter, or every weight."""

    kind: Annotated[Literal["lora", "dora", "none"], bears("train")] = "lora"
    """none = full fine-tuning"""
    rank: Annotated[Count, bears("train")] = 32
    """inner width of the adapter"""
    alpha: Annotated[Count, bears("train")] = 32
    """the adapter's output is scaled by alpha / rank"""
    rslora: Annotated[bool, bears("train", absent=False)] = False
    """scale by alpha / sqrt(rank) instead: high ranks then learn as fast as low ones (rsLoRA)"""
    init: Annotated[Literal["xavier", "kaiming"], bears("train", absent="xavier")] = "xavier"
    """distribution of A at the start (B is 0): xavier = normal, variance 2 / (inputs + rank), Megatron-Bridge's
    default; kaiming = uniform, variance 1 / (3 * inputs), PEFT's default: for recipes for PEFT"""
    b_lr_ratio: Annotated[float, bears("train", absent=1.0)] = Field(default=1.0, ge=1e-3, le=1000)
    """ratio of B's learning rate to A's; LoRA+ uses 16"""
    dropout: Annotated[float, bears("train")] = Field(default=0.0, ge=0, lt=1)
    """dropout of the adapter's input"""
    lean: Annotated[bool, NOWHERE] = True
    """LoRA communicates tensors of its rank instead of activations; false = Megatron-Bridge's layers; both compute the
    same function"""
    # strict=False lets a YAML list become a tuple; the names in it stay strict
    targets: Annotated[
        Annotated[Literal["all-linear"] | Annotated[AdapterTargets, Field(strict=False)], WrapValidator(_one_of_both)],
        bears("train"),
    ] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    """Megatron's names of the layers with an adapter; fc1 and fc2 include the experts; all-linear = all of them that
    the model has: attention, dense layers, experts and shared experts"""
    experts: Annotated[Literal["each", "shared"], bears("train")] = "each"
    """each = one adapter per expert, which PEFT can load; shared = one smaller adapter for all experts of a layer; both
    give the same model at any layout"""

    @property
    def names(self) -> AdapterTargets:
        """Megatron's names of the layers with an adapter. Names that the model lacks are ignored."""
        return get_args(AdapterTarget) if self.targets == ALL_LINEAR else self.targets


class Layout(Section):
    """Processes and the cuts of the model: tp * cp * pp * dp = etp * ep * pp * edp = nodes * gpus_per_node.

    conf/rules/layout.py has the rules.
    """

    nodes: Annotated[Degree, NOWHERE] = 1
    """hosts"""
    gpus_per_node: Annotated[Degree, NOWHERE] = 1
    """processes per host: one per GPU, or gloo processes on a CPU"""
    tp: Annotated[Degree, bears(derived="prepare")] = 1
    """tensor parallel: cuts attention and dense layers; best within a host"""
    pp: Annotated[Degree, NOWHERE] = 1
    """pipeline parallel: cuts the stack of layers into stages"""
    vpp: Annotated[int | None, NOWHERE] = Field(default=None, ge=2, le=65536)
    """stages per pipeline rank (interleaved schedule); null = 1"""
    cp: Annotated[Degree, bears(derived="prepare")] = 1
    """context parallel: cuts sequences"""
    ep: Annotated[Degree, NOWHERE] = 1
    """expert parallel: distributes the experts; not a factor of tp * cp * pp * dp"""
    etp: Annotated[Degree, NOWHERE] = 1
    """tensor parallel inside each expert; Megatron's default would be tp"""
    sp: Annotated[bool, bears(derived="prepare")] = False
    """sequence parallel: cuts the other activations too; MoE with tp > 1 needs it"""
    first_stage_layers: Annotated[Count | None, NOWHERE] = None
    """layers on the first pipeline rank; null = even"""
    last_stage_layers: Annotated[Count | None, NOWHERE] = None
    """layers on the last pipeline rank; null = even"""
    auto: Annotated[bool, NOWHERE] = False
    """use the fastest layout of these nodes and gpus_per_node that fits, with its micro_batch and recompute; values of
    those keys are ignored. `layout: auto` = all GPUs of this host, or of one host of hardware.gpu if this host has none
    or gang.engine is not local"""

    @property
    def world(self) -> int:
        """Number of processes of the run."""
        return self.nodes * self.gpus_per_node


class Hardware(Section):
    """The hardware that the run is planned for; never part of the run's identity."""

    gpu: Annotated[Place | None, NOWHERE] = None
    """a100, h100, h200, b200, gb200, l4, a10, rtx4090, a6000, l40s, cpu, or a .yaml file (conf/planner/hardware.py);
    null = the one in the run's name, else cpu for tiny://KIND and h100 for any other model"""
    price: Annotated[float | None, NOWHERE] = Field(default=None, ge=0, le=10_000)
    """USD per GPU and hour; null = the .yaml's, or an approximate rental price"""
    mtbf: Annotated[float, NOWHERE] = Field(default=50_000, gt=0, le=10**9)
    """GPU-hours between failures that end an attempt, for the predicted time; default: Llama 3's 419 failures of 16,384
    H100 in 54 days (arXiv 2407.21783)"""
    gate: Annotated[Literal["stop", "warn"], NOWHERE] = "stop"
    """action if the plan does not fit; stop = end before anything is downloaded"""


class Checkpoint(Section):
    """Checkpoints during training."""

    save_every: Annotated[Interval, bears(derived="train")]
    """steps between checkpoints; below 1 = share of all steps; epoch = once per epoch; the last step is always saved;
    with keep_best another value makes another training, as the best checkpoint depends on it"""
    keep: Annotated[Count | None, bears("train", held=False)] = None
    """number of newest complete checkpoints to keep; null = all"""
    keep_best: Annotated[bool, bears("train", absent=False, held=False)] = False
    """keep the checkpoint with the lowest validation loss too; export.checkpoint=best exports it"""
    save_optimizer: Annotated[bool, bears("train")] = True
    """needed to resume a training"""
    background: Annotated[bool, NOWHERE] = True
    """write checkpoints while training continues; false = training waits"""


class Log(Section):
    """Reports during training."""

    every: Annotated[Count, NOWHERE] = 1
    """steps between lines of metrics"""
    layer_norms: Annotated[bool, NOWHERE] = False
    """add the norm of every layer's gradient to each line"""
    noise_scale: Annotated[bool, NOWHERE] = False
    """add the gradient noise scale in tokens, the largest batch that still pays; needs two micro batches per step and
    rank, and a layout of only tp and dp"""
    peak_tflops: Annotated[float | None, NOWHERE] = Field(default=None, ge=1e-3, le=10**6)
    """per device, dense, for MFU; null = from the device's name"""
    profile_every: Annotated[int | None, NOWHERE] = Field(default=None, ge=2)
    """steps between two profiles of torch's profiler, in paths.logs/profile/step-N; python -m trainer.profiling FOLDER
    reads them; null = none"""
    packing_cost: Annotated[bool | None, NOWHERE] = None
    """with model.base, also compute the loss of the unpacked base before the first step, which reads it again; null =
    unless a quantised release must be unpacked for it"""


class Evaluate(Section):
    """Evaluation of the base and the tuned model with vLLM."""

    tasks: Annotated[tuple[Place, ...], bears("evaluate")] = Field(default=("held_out",), strict=False)
    """held_out = the data's test split; else lm-eval's names, or paths of task files (YAML); empty = no evaluation, and
    no promotion"""
    base: Annotated[Literal["required", "optional"], NOWHERE] = "required"
    """if the base model cannot be evaluated: required = nothing is trained; optional = it is trained, but not
    promoted"""
    rows: Annotated[Count | None, bears("evaluate")] = 200
    """rows per task; null = all"""
    max_tokens: Annotated[Count, bears("evaluate")] = 256
    """longest answer to a held-out prompt"""
    samples: Annotated[Count, bears("evaluate")] = 20
    """rows per task in the table of prompts, answers and references"""
    precision: Annotated[Literal["fp32", "bf16"] | None, bears(derived="evaluate")] = None
    """of serving; null = train.precision"""
    quantization: Annotated[Literal["fp8"] | None, bears("evaluate", absent=None)] = None
    """fp8 = weights are rounded to FP8 when they are loaded: half of bf16's bytes, different answers"""
    adapter: Annotated[Literal["merged", "unmerged", "packed"], bears(derived="evaluate")] = "merged"
    """how a trained adapter is served: merged = the whole exported model; unmerged = the released model and the
    exported adapter; packed = the codes of model.base and the exported adapter, as in training"""
    nodes: Annotated[Degree | None, NOWHERE] = None
    """hosts that serve one model, each a stage of vLLM's pipeline; null = the fewest on which it fits"""
    gpus: Annotated[Degree | None, NOWHERE] = None
    """GPUs of a host, vLLM's tensor parallel degree; null = the fewest on which all questions fit at once, without a
    plan all of the host"""
    engine: Annotated[Engine | None, NOWHERE] = None
    """engine that starts it on separate hosts; null = gang.engine if several hosts serve or this host has no GPU"""
    pool: Annotated[Text | None, NOWHERE] = None
    """for prefect: work pool with a worker per host; null = gang.pool"""
    expert_parallel: Annotated[bool | None, NOWHERE] = None
    """distribute whole experts over these GPUs instead of a part of each; null = the planner decides"""
    eager: Annotated[bool | None, NOWHERE] = None
    """no compilation and no CUDA graphs: starts earlier, answers slower; null = if graphs save less time than they
    cost"""
    parity_rows: Annotated[Number, bears("train", "evaluate", held=False)] = 8
    """prompts whose log-probabilities training and serving must agree on; 0 = none"""
    parity_bound: Annotated[float | None, bears("evaluate")] = Field(default=None, gt=0, le=1)
    """mean difference, nats per token; null = 1e-3 if everything is fp32, else 0.05"""
    seed: Annotated[Seed, bears("evaluate")] = 1234
    """of lm-eval's few-shot choices; answers are greedy"""


class Gang(Section):
    """Start, watch and restart of a run over several hosts; never part of the run's identity."""

    engine: Annotated[Engine, NOWHERE] = HERE
    """engine that starts a process group per host; local = all of them on this host"""
    pool: Annotated[Text, NOWHERE] = NODES_POOL
    """for prefect: work pool with one worker per host"""
    start_within: Annotated[float, NOWHERE] = Field(default=900, ge=0.1, le=10**6)
    """seconds in which all hosts must join; otherwise they are released"""
    silent_after: Annotated[float, NOWHERE] = Field(default=12, ge=9, le=10**6)
    """seconds without a heartbeat after which a host counts as lost"""
    stall_factor: Annotated[float, NOWHERE] = Field(default=10, ge=2, le=1000)
    """a step may take this many times its usual time"""
    stall_seconds: Annotated[float, NOWHERE] = Field(default=120, ge=0.1, le=10**6)
    """and at least this many seconds"""
    quiet_seconds: Annotated[float, NOWHERE] = Field(default=3600, ge=0.1, le=10**6)
    """seconds that loading, validation or a save may take without a step"""
    retries: Annotated[Number, NOWHERE] = 3
    """new attempts after hosts failed; a later checkpoint starts the count again"""
    min_nodes: Annotated[Degree | None, NOWHERE] = None
    """fewest hosts with which training continues; null = layout.nodes"""
    spares: Annotated[int, NOWHERE] = Field(default=0, ge=0, le=1000)
    """hosts that a training has more than it uses, to replace lost ones at once"""
    # With 2 s to the signal and 8 s for a report, everything ends before Prefect's worker kills it after 30 s.
    grace: Annotated[int, NOWHERE] = Field(default=20, ge=1, le=20)
    """seconds that a stopped training has to save a checkpoint, on one host or several"""
    preflight: Annotated[bool, NOWHERE] = True
    """measure hosts and network before the model is loaded"""
    network: Annotated[Network | None, NOWHERE] = None
    """preset of conf/network.py for the network between hosts; null = none"""


class Promote(Section):
    """Promotion of the tuned model in MLflow's registry."""

    model: Annotated[Text, bears("promote")] = "{name}"
    """registered model; {name} is the run's name"""
    metric: Annotated[Text, bears("promote")] = "held_out/exact_match"
    """task/metric that decides; higher is better, except for perplexity and bits per byte"""
    margin: Annotated[float, bears("promote")] = Field(default=0.0, ge=0)
    """a model replaces the champion if it is better by more than this"""
    confidence: Annotated[float, bears("promote", absent=0.0)] = Field(default=0.95, ge=0, lt=1)
    """required confidence of a gain over the base and the champion, by a paired test of the rows: 0.95 = equal models
    show such a gain in at most 5 % of cases; 0 = only promote.margin decides"""


Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]*$", max_length=100)]


class Track(Section):
    """Destination of metrics, owner and project. The server is MLFLOW_TRACKING_URI, or a file in runs/."""

    experiment: Annotated[Text, NOWHERE] = "finetune"
    """MLflow's experiment"""
    wandb: Annotated[Text | None, NOWHERE] = None
    """Weights & Biases project for the metrics too"""
    owner: Annotated[Label | None, NOWHERE] = None
    """owner of the run, a tag in Prefect and MLflow; null = FINETUNE_OWNER, else the login name"""
    project: Annotated[Label, NOWHERE] = "default"
    """project of the run, a tag in Prefect and MLflow; quotas and costs are per project"""
    tensorboard: Annotated[bool, NOWHERE] = False
    """write TensorBoard's files too, into tensorboard/ of the training's artifact"""


class Paths(Section):
    """Paths of this run's files; never part of the run's identity. {name} is the run's name."""

    model: Annotated[Place, NOWHERE] = "runs/{name}/model"
    """released checkpoint, Hugging Face format"""
    base: Annotated[Place, NOWHERE] = "runs/{name}/base"
    """the same, converted to Megatron's torch_dist format"""
    data: Annotated[Place, NOWHERE] = "runs/{name}/data"
    """training.jsonl and validation.jsonl"""
    reference: Annotated[Place, NOWHERE] = "runs/{name}/reference"
    """outputs of the reference model or teacher for the prepared rows, for dpo and distill"""
    teacher: Annotated[Place, NOWHERE] = "runs/{name}/teacher"
    """released checkpoint of train.teacher"""
    teacher_base: Annotated[Place, NOWHERE] = "runs/{name}/teacher-base"
    """the same, converted"""
    output: Annotated[Place, NOWHERE] = "runs/{name}/output"
    """checkpoints and metrics of this run"""
    logs: Annotated[Place, NOWHERE] = "runs/{name}/logs"
    """Megatron's output, a file per rank"""
    export: Annotated[Place, NOWHERE] = "runs/{name}/export"
    """the trained model in Hugging Face's formats"""
    served: Annotated[Place, NOWHERE] = "runs/{name}/export/merged"
    """the evaluated model"""
    prompts: Annotated[Place, NOWHERE] = "runs/{name}/prompts"
    """prepared rows of reinforce.source"""
    reinforced: Annotated[Place, NOWHERE] = "runs/{name}/reinforced"
    """checkpoints, samples and metrics of reinforcement learning"""
    parity: Annotated[Place, NOWHERE] = "runs/{name}/output/parity.json"
    """training's log-probabilities of fixed prompts"""
    evaluation: Annotated[Place, NOWHERE] = "runs/{name}/evaluation"
    """scores and answers"""
    of_base: Annotated[Place, NOWHERE] = "runs/{name}/evaluation-base"
    """scores and answers of the base; for evaluate.quantization and model.base"""
    kernels: Annotated[Place, NOWHERE] = "runs/kernels"
    """compiled kernels of torch and vLLM, kept between starts"""

    @field_validator("*", mode="before")
    @classmethod
    def null_is_the_default(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        return cls.model_fields[info.field_name].default if value is None else value
