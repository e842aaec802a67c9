"""Reinforcement learning as a training: which values go together, and the run that Megatron's loop is given.

as_training(run) -> Run      steps, batch, learning rate and places of the stage, in training's own keys
is_policy(run) -> bool       whether a run is such a one
transport(run, on_gpus)      the way that weights take, as trainer and plan know it
engines(run)                 engines of vLLM on all hosts
in_turn(run)                 whether they have GPUs of training, in turn with it
cut(run)                     GPUs, or processes on a CPU, that each engine's model is cut over
contents(run)                digests of rewards, environments and judges' texts of one's own
unfit(run, place, kind)      why prepared data of a kind have no prompts for it
unlike(run, facts)           why a model is none for what is asked
"""

import math
from collections.abc import Iterator

from conf import rewards
from conf.model_facts import ModelFacts
from conf.rules import serving
from conf.schema.run import Run
from contract import checksums
from contract.faults import Fault

ANSWERS = 2**20  # of a step, which is one file of the journal, and is held by every process that trains
# Layers that an adapter can be sent of by itself, and what they are called where it is served.
ADAPTED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def is_asked(run: Run) -> bool:
    return run.reinforce.steps > 0


def has_prompts(run: Run) -> bool:
    """Whether prompts are rows of their own, beside those of training."""
    return is_asked(run) and run.reinforce.source is not None


def of_prompts(run: Run) -> Run:
    """The run whose data are the prompts."""
    return run.model_copy(update={"data": run.data.model_copy(update={"source": run.reinforce.source})})


def transport(run: Run, on_gpus: bool) -> str:
    """The way that weights get to vLLM, where training is on GPUs or not."""
    asked = run.reinforce
    if asked.transport or not on_gpus:
        return asked.transport or "gloo"
    return "ipc" if in_turn(run) else "nccl"


def engines(run: Run) -> int:
    """Engines of vLLM on all hosts."""
    return run.reinforce.engines * max(1, run.reinforce.hosts)


def in_turn(run: Run) -> bool:
    """Whether engines have GPUs of training, in turn with it. On a CPU nobody sleeps."""
    asked = run.reinforce
    return asked.engine_gpus == 0 if asked.in_turn is None else asked.in_turn


def cut(run: Run) -> int:
    """GPUs of an engine; on a CPU, processes of it."""
    return max(1, run.reinforce.engine_gpus)


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for values that are right alone and wrong together."""
    asked, data = run.reinforce, run.data
    if not asked.steps:
        return
    if asked.prompts % asked.updates:
        yield "reinforce.updates", f"{asked.updates} is no factor of reinforce.prompts {asked.prompts}"
    if asked.prompts * asked.samples > ANSWERS:
        held = f"a step is one file of the journal, and has {ANSWERS:,} answers at most"
        yield "reinforce.prompts", f"{asked.prompts:,} with {asked.samples:,} answers each; {held}"
    if asked.max_tokens >= data.seq_length:
        yield "reinforce.max_tokens", f"{asked.max_tokens} leaves no prompt of data.seq_length {data.seq_length}"
    if asked.overlong > asked.max_tokens:
        yield "reinforce.overlong", f"{asked.overlong} is above reinforce.max_tokens {asked.max_tokens}"
    if asked.reward == "function" and asked.function is None:
        yield "reinforce.function", "required with reinforce.reward function, and missing"
    if asked.reward != "function" and asked.function is not None:
        yield "reinforce.function", f"has no effect with reinforce.reward {asked.reward}"
    for key in ("judge", "judge_model", "judge_prompt"):
        if asked.reward == "judge" and getattr(asked, key) is None:
            yield f"reinforce.{key}", "required with reinforce.reward judge, and missing"
        if asked.reward != "judge" and getattr(asked, key) is not None:
            yield f"reinforce.{key}", f"has no effect with reinforce.reward {asked.reward}"
    if asked.environment is None and asked.turns > 1:
        yield "reinforce.environment", f"required with reinforce.turns {asked.turns}, and missing: it replies between"
    if asked.environment is not None and asked.turns == 1:
        yield "reinforce.environment", "has no effect with reinforce.turns 1: another number, such as 4, would do"
    if asked.pattern is not None and asked.reward not in ("regex", "json_schema"):
        yield "reinforce.pattern", f"has no effect with reinforce.reward {asked.reward}"
    yield from _own(run)
    if run.checkpoint.save_every == "epoch":
        yield "checkpoint.save_every", "epoch, but steps of reinforce have none: name a number of steps, or a share"
    if asked.source and data.mixture:
        yield "reinforce.source", "has no effect on data.mixture: name data.source"
    if asked.transport == "nccl" and run.hardware.gpu == "cpu":
        yield "reinforce.transport", "nccl goes from GPU to GPU, and hardware.gpu is cpu: gloo, or null"
    yield from _places(run)
    if asked.signal and (reason := without_signal(run)):
        yield "reinforce.signal", f"compares each gradient with Adam's mean of those before it, and {reason}"
    if asked.transport == "adapter":
        yield from _alone(run)
    if asked.kl and (run.adapter.kind == "none" or asked.start == "trained"):
        yield "reinforce.kl", "is measured from the base below an adapter: adapter.kind lora, reinforce.start base"


def _own(run: Run) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a pattern of one's own, a judge's address, or the name of a function.

    The files of functions are looked at where the stage runs, which may be another host.
    """
    asked = run.reinforce
    rule = {"regex": rewards.regex, "json_schema": rewards.schema}.get(asked.reward)
    for key, value, check in (
        ("pattern", asked.pattern, rule),
        ("judge", asked.judge, rewards.judge_address),
        ("function", asked.function, rewards.place),
        ("environment", asked.environment, rewards.place),
    ):
        try:
            if value is not None and check:
                check(value)
        except Fault as fault:
            yield f"reinforce.{key}", str(fault)


def unfit(run: Run, place: str, kind: str) -> str:
    """The reason why prepared data of this kind have no prompts to answer; empty where they have."""
    if kind == "sft":
        return ""
    key = "reinforce.source" if run.reinforce.source else "data.source"
    held = "texts for pretraining" if kind == "text" else "rows with a chosen and a rejected answer"
    other = "" if run.reinforce.source else ", such as reinforce.source may name"
    return f"{key}: {place} holds {held}; reinforce asks the prompts of rows with one answer{other}"


def unlike(run: Run, facts: ModelFacts) -> str:
    """The reason why this model is none for what the section asks for; empty where it is one."""
    if run.reinforce.transport == "adapter" and facts.experts:
        return "reinforce.transport: adapter, but adapters of a model with experts are sent merged; gloo"
    if run.reinforce.replay_experts and not facts.experts:
        return "reinforce.replay_experts: true, but the model has no experts; false"
    return uncut(run, facts)


def uncut(run: Run, facts: ModelFacts) -> str:
    """The reason why this model cannot be cut over the GPUs of an engine; empty where it can."""
    gpus = cut(run)
    return next(serving.uncut(facts, gpus, serving.has_whole_experts(facts, gpus), "reinforce.engine_gpus"), "")


def contents(run: Run) -> dict[str, str]:
    """Digests of the files of one's own, by the keys that name them. Where they lie bears no identity."""
    asked = run.reinforce
    named = {"function": asked.function, "environment": asked.environment, "judge_prompt": asked.judge_prompt}
    return {key: _content(key, place) for key, place in named.items() if place}


def _content(key: str, place: str) -> str:
    try:
        if key == "judge_prompt":
            name, text = "", rewards.judge_prompt(place)
        else:
            name, text = rewards.function(place, rewards.CALLED_WITH[key])
    except Fault as fault:
        raise Fault(f"reinforce.{key}: {fault}") from None
    return f"sha256:{checksums.of(text)}" + (f":{name}" if name else "")


def _places(run: Run) -> Iterator[tuple[str, str]]:
    """Yield what stands against several engines, or against sampling beside training."""
    asked, cpu = run.reinforce, run.hardware.gpu == "cpu"
    if asked.hosts:
        yield from _hosts(run)
    if cpu:
        yield from _on_cpu(run)
    elif in_turn(run):
        yield from _in_turn(run)
    elif not asked.engine_gpus:
        yield "reinforce.in_turn", "false, and reinforce.engine_gpus 0 leaves vLLM no GPU of its own: 1, or null"
    elif asked.transport == "ipc":
        yield "reinforce.transport", "ipc goes through the memory of one GPU, and vLLM has its own: nccl, or null"
    if asked.staleness and asked.correction == "none":
        yield "reinforce.correction", "none would train on answers of older policies as if they were of this one: tis"


def _on_cpu(run: Run) -> Iterator[tuple[str, str]]:
    """Yield what has no sense without GPUs."""
    asked = run.reinforce
    if asked.engine_gpus == 1:
        yield "reinforce.engine_gpus", f"{asked.engine_gpus}, and hardware.gpu is cpu: 0, each engine has its cores"
    if asked.in_turn is not None:
        yield "reinforce.in_turn", f"{str(asked.in_turn).lower()}, and hardware.gpu is cpu: null, nobody has a GPU"


def _in_turn(run: Run) -> Iterator[tuple[str, str]]:
    """Yield what stands against vLLM and Megatron on the same GPUs."""
    asked, each = run.reinforce, run.layout.gpus_per_node
    taken, several = asked.engines * cut(run), asked.engine_gpus > 0
    if asked.transport == "nccl":
        own = "reinforce.in_turn=false" if several else "reinforce.engine_gpus=1"
        yield "reinforce.transport", f"nccl goes to GPUs of vLLM's own, and it has none: {own}, or null"
    if asked.staleness or (asked.engines > 1 and not several):
        key = "staleness" if asked.staleness else "engines"
        where = "GPUs in turn: reinforce.in_turn=false" if several else "one GPU in turn: reinforce.engine_gpus=1"
        told = f"{getattr(asked, key)}, but vLLM and Megatron have {where} gives vLLM its own"
        yield f"reinforce.{key}", told
    if taken > each and several and not asked.hosts:
        many = (
            f"{asked.engine_gpus}" if asked.engines == 1 else f"{asked.engine_gpus} for each of {asked.engines} engines"
        )
        yield (
            "reinforce.engine_gpus",
            f"{many}, in turn with training, which has {each} (layout.gpus_per_node): as many at most, or "
            "reinforce.in_turn=false",
        )


def _hosts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield what stands against hosts of vLLM's own."""
    asked, each = run.reinforce, run.layout.gpus_per_node
    if asked.transport in ("ipc", "files", "adapter"):
        yield "reinforce.transport", f"{asked.transport} stays on one host, and vLLM has {asked.hosts} of its own: null"
    if not asked.engine_gpus and run.hardware.gpu != "cpu":
        yield "reinforce.engine_gpus", f"0, but vLLM on {asked.hosts} hosts of its own has none of training's GPUs: 1"
    elif asked.in_turn:
        yield "reinforce.in_turn", f"true, but vLLM on {asked.hosts} hosts of its own has none of training's GPUs: null"
    if engines(run) > asked.prompts:
        several = f" with {asked.engines} engines each" if asked.engines > 1 else ""
        shared = f"a step has {asked.prompts} prompts, of which an engine has one at least"
        yield "reinforce.hosts", f"{asked.hosts}{several}, and {shared}: {asked.prompts // asked.engines} at most"
    # On a CPU each engine counts for one: an engine of several processes is a rehearsal.
    of_each = asked.engine_gpus if run.hardware.gpu != "cpu" else 1
    if asked.engines * max(1, of_each) > each:
        gpus = f" with {of_each} GPUs" if of_each > 1 else ""
        yield (
            "reinforce.engines",
            f"{asked.engines}{gpus} on each of {asked.hosts} hosts of their own, and layout.gpus_per_node is {each}",
        )


def without_signal(run: Run) -> str:
    """Reason why Adam's mean of gradients, with which each is compared, cannot be read; empty where it can."""
    optimizer = run.optimizer
    if optimizer.kind != "adamw":
        return f"optimizer.kind {optimizer.kind} keeps none"
    if optimizer.states != "fp32":
        return f"optimizer.states {optimizer.states} keep it rounded"
    if optimizer.offload:
        return f"optimizer.offload {optimizer.offload:g} keeps it on the host"
    return "" if optimizer.beta1 else "optimizer.beta1 0 keeps none"


def _alone(run: Run) -> Iterator[tuple[str, str]]:
    """Yield reasons why the adapter cannot be all that goes to vLLM."""
    others = [name for name in run.adapter.names if name not in ADAPTED]
    if run.adapter.kind != "lora":
        yield "reinforce.transport", f"adapter, but adapter.kind is {run.adapter.kind}: vLLM adds those of lora alone"
    elif others:
        yield "reinforce.transport", f"adapter, but adapter.targets has {others[0]}; vLLM gets {', '.join(ADAPTED)}"


def as_training(run: Run) -> Run:
    """The run whose training is this reinforcement learning: a step of it is an optimizer step."""
    asked = run.reinforce
    if not asked.steps:
        raise Fault("reinforce.steps: 0, so there is nothing to do; a number of steps, such as 30, would do")
    every = run.checkpoint.save_every
    if isinstance(every, float):
        every = math.ceil(every * asked.steps)
    assert isinstance(every, int), "contradictions() refuses epochs"
    batch = asked.prompts * asked.samples // asked.updates
    data = run.paths.prompts if asked.source else run.paths.data
    sections = {
        "train": {
            "steps": asked.steps * asked.updates,
            "epochs": None,
            "global_batch": batch,
            "ramp_from": None,
            "ramp_by": None,
            "ramp_sequences": None,
            "validate_every": 0,
            "stop_after": None,
            "stop_after_worse": None,
            "ema_decay": None,
            "z_loss": 0.0,
            "seed": asked.seed,
        },
        "optimizer": {"lr": asked.lr, "min_lr": asked.lr, "warmup": None, "warmup_steps": 0, "decay": "constant"},
        "checkpoint": {"save_every": every * asked.updates, "keep_best": False},
        # A head that predicts further tokens would learn from samples as if they were right.
        "model": {"mtp_loss_scale": 0.0, "adapter": None},
        # Rewards say nothing about how busy experts are: only who asks for balancing has it beside them.
        "moe": {"aux_loss_coeff": run.moe.aux_loss_coeff or 0.0},
        "data": {"source": asked.source} if asked.source else {},
        "paths": {"output": run.paths.reinforced, "data": data, "parity": f"{run.paths.reinforced}/parity.json"},
    }
    return run.model_copy(update={name: getattr(run, name).model_copy(update=keys) for name, keys in sections.items()})


def is_policy(run: Run) -> bool:
    """Whether the run is one that as_training() has made."""
    return run.paths.output == run.paths.reinforced
