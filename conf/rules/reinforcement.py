"""Reinforcement learning as a training: rules between its keys, and the run for Megatron's loop.

as_training(run) -> Run      the stage's steps, batch, learning rate and paths, in the keys of training
is_policy(run) -> bool       whether a run is a result of as_training()
transport(run, on_gpus)      how weights are sent to vLLM
engines(run)                 number of vLLM engines on all hosts
in_turn(run)                 whether engines and training use the same GPUs alternately
cut(run)                     GPUs, or processes on a CPU, over which each engine's model is cut
contents(run)                digests of the user's rewards, environments and judge's texts
unfit(run, place, kind)      why prepared data of a kind have no prompts
unlike(run, facts)           why a model does not support the section's values
"""

import math
from collections.abc import Iterator

from conf import rewards
from conf.model_facts import ModelFacts
from conf.rules import batch_ramp, schedule, serving
from conf.schema.run import Run
from contract import checksums
from contract.faults import Fault, named

ANSWERS = 2**20  # maximum per step: a step is one file of the journal, in the memory of every training process
# Keys that one value of reinforce.reward requires, and that have no effect with others.
OF_REWARD = {"function": "function", "judge": "judge", "judge_model": "judge", "judge_prompt": "judge"}
# Layers whose adapter can be sent without the base, and vLLM's names of them.
ADAPTED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def is_asked(run: Run) -> bool:
    return run.reinforce.steps > 0


def has_prompts(run: Run) -> bool:
    """Whether the prompts are separate rows, not those of training."""
    return is_asked(run) and run.reinforce.source is not None


def of_prompts(run: Run) -> Run:
    """The run whose data are the prompts."""
    return run.changed(data={"source": run.reinforce.source})


def transport(run: Run, on_gpus: bool) -> str:
    """Transport of weights to vLLM; `on_gpus` is whether training uses GPUs."""
    if run.reinforce.transport or not on_gpus:
        return run.reinforce.transport or "gloo"
    return "ipc" if in_turn(run) else "nccl"


def engines(run: Run) -> int:
    """Number of vLLM engines on all hosts."""
    return run.reinforce.engines * max(1, run.reinforce.hosts)


def in_turn(run: Run) -> bool:
    """Whether engines and training use the same GPUs alternately. On a CPU both stay loaded."""
    reinforce = run.reinforce
    return reinforce.engine_gpus == 0 if reinforce.in_turn is None else reinforce.in_turn


def cut(run: Run) -> int:
    """GPUs of an engine; on a CPU, its processes."""
    return max(1, run.reinforce.engine_gpus)


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for values that are valid alone and invalid together."""
    if not is_asked(run):
        return
    for key, problem in _of_section(run):
        yield f"reinforce.{key}", problem
    if run.checkpoint.save_every == "epoch":
        yield "checkpoint.save_every", "epoch, but reinforce has no epochs: use a number of steps, or a share"


def _of_section(run: Run) -> Iterator[tuple[str, str]]:
    """Yield problems of keys of the section, without its name."""
    section, data = run.reinforce, run.data
    if section.prompts % section.updates:
        yield "updates", f"{section.updates} does not divide reinforce.prompts {section.prompts}"
    if section.prompts * section.samples > ANSWERS:
        limit = f"a step has {ANSWERS:,} answers at most"
        yield "prompts", f"{section.prompts:,} with {section.samples:,} answers each; {limit}"
    if section.max_tokens >= data.seq_length:
        yield "max_tokens", f"{section.max_tokens} leaves no room for a prompt in data.seq_length {data.seq_length}"
    if section.overlong > section.max_tokens:
        yield "overlong", f"{section.overlong} is above reinforce.max_tokens {section.max_tokens}"
    for key, reward in OF_REWARD.items():
        if section.reward == reward and getattr(section, key) is None:
            yield key, f"required with reinforce.reward {reward}, and missing"
        if section.reward != reward and getattr(section, key) is not None:
            yield key, f"has no effect with reinforce.reward {section.reward}"
    if section.environment is None and section.turns > 1:
        yield "environment", f"required with reinforce.turns {section.turns}, and missing: it writes the replies"
    if section.environment is not None and section.turns == 1:
        yield "environment", "has no effect with reinforce.turns 1: use a larger number, such as 4"
    if section.pattern is not None and section.reward not in ("regex", "json_schema"):
        yield "pattern", f"has no effect with reinforce.reward {section.reward}"
    yield from _own(run)
    if section.source and data.mixture:
        yield "source", "cannot be combined with data.mixture: use data.source"
    if section.transport == "nccl" and run.hardware.gpu == "cpu":
        yield "transport", "nccl sends from GPU to GPU, but hardware.gpu is cpu: gloo, or null"
    yield from _places(run)
    if section.signal and (reason := without_signal(run)):
        yield "signal", f"compares each gradient with Adam's mean of earlier gradients, but {reason}"
    if section.transport == "adapter":
        yield from _alone(run)
    if section.kl and (run.adapter.kind == "none" or section.start == "trained"):
        yield "kl", "is measured against the base without its adapter: adapter.kind lora, reinforce.start base"


def _own(run: Run) -> Iterator[tuple[str, str]]:
    """Yield problems of the user's pattern, of a judge's address, or of the name of a function.

    The host that runs the stage checks the files of functions.
    """
    section = run.reinforce
    rule = {"regex": rewards.regex, "json_schema": rewards.schema}.get(section.reward)
    for key, value, check in (
        ("pattern", section.pattern, rule),
        ("judge", section.judge, rewards.judge_address),
        ("function", section.function, rewards.place),
        ("environment", section.environment, rewards.place),
    ):
        try:
            if value is not None and check:
                check(value)
        except Fault as fault:
            yield key, str(fault)


def unfit(run: Run, place: str, kind: str) -> str:
    """The reason why prepared data of this kind have no prompts; empty if they have."""
    if kind == "sft":
        return ""
    key = "reinforce.source" if run.reinforce.source else "data.source"
    content = "texts for pretraining" if kind == "text" else "rows with a chosen and a rejected answer"
    other = "" if run.reinforce.source else ", which reinforce.source may name"
    return f"{key}: {place} contains {content}; reinforce needs rows with a prompt and one answer{other}"


def unlike(run: Run, facts: ModelFacts) -> str:
    """The reason why this model does not support the section's values; empty if it does."""
    if run.reinforce.transport == "adapter" and facts.experts:
        return "reinforce.transport: adapter, but adapters of a model with experts are sent merged; gloo"
    if run.reinforce.replay_experts and not facts.experts:
        return "reinforce.replay_experts: true, but the model has no experts; false"
    return uncut(run, facts)


def uncut(run: Run, facts: ModelFacts) -> str:
    """The reason why this model cannot be cut over the GPUs of an engine; empty if it can."""
    gpus = cut(run)
    return next(serving.uncut(facts, gpus, serving.has_whole_experts(facts, gpus), "reinforce.engine_gpus"), "")


def contents(run: Run) -> dict[str, str]:
    """Digests of the user's files, by the keys that name them. Their paths do not count for identity."""
    places = {key: getattr(run.reinforce, key) for key in ("function", "environment", "judge_prompt")}
    return {key: _content(key, place) for key, place in places.items() if place}


def _content(key: str, place: str) -> str:
    with named(f"reinforce.{key}"):
        if key == "judge_prompt":
            name, text = "", rewards.judge_prompt(place)
        else:
            name, text = rewards.function(place, rewards.CALLED_WITH[key])
    return f"sha256:{checksums.of(text)}" + (f":{name}" if name else "")


def _places(run: Run) -> Iterator[tuple[str, str]]:
    """Yield problems of the engines' GPUs and hosts, and of sampling during training."""
    section, cpu = run.reinforce, run.hardware.gpu == "cpu"
    if section.hosts:
        yield from _hosts(run)
    if cpu:
        yield from _on_cpu(run)
    elif in_turn(run):
        yield from _in_turn(run)
    elif not section.engine_gpus:
        yield "in_turn", "false, but reinforce.engine_gpus 0 gives vLLM no separate GPU: 1, or null"
    elif section.transport == "ipc":
        yield "transport", "ipc uses the memory of one GPU, but vLLM has separate GPUs: nccl, or null"
    if section.staleness and section.correction == "none":
        yield "correction", "none would treat answers of older policies as the current policy's: tis"


def _on_cpu(run: Run) -> Iterator[tuple[str, str]]:
    """Yield settings that need GPUs."""
    section = run.reinforce
    if section.engine_gpus == 1:
        yield "engine_gpus", f"{section.engine_gpus}, but hardware.gpu is cpu: 0"
    if section.in_turn is not None:
        yield "in_turn", f"{str(section.in_turn).lower()}, but hardware.gpu is cpu: null"


def _in_turn(run: Run) -> Iterator[tuple[str, str]]:
    """Yield problems of vLLM and Megatron on the same GPUs."""
    section, each = run.reinforce, run.layout.gpus_per_node
    taken, several = section.engines * cut(run), section.engine_gpus > 0
    if section.transport == "nccl":
        remedy = "reinforce.in_turn=false" if several else "reinforce.engine_gpus=1"
        yield "transport", f"nccl needs separate GPUs for vLLM: {remedy}, or null"
    if section.staleness or (section.engines > 1 and not several):
        key = "staleness" if section.staleness else "engines"
        remedy = "GPUs: reinforce.in_turn=false" if several else "one GPU: reinforce.engine_gpus=1"
        yield key, f"{getattr(section, key)}, but vLLM and Megatron share {remedy} gives vLLM separate GPUs"
    if taken > each and several and not section.hosts:
        of_engines = f" for each of {section.engines} engines" if section.engines > 1 else ""
        limit = f"training, which shares its GPUs, has {each} (layout.gpus_per_node)"
        remedy = "as many at most, or reinforce.in_turn=false"
        yield "engine_gpus", f"{section.engine_gpus}{of_engines}, but {limit}: {remedy}"


def _hosts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield problems of separate hosts for vLLM."""
    section, each = run.reinforce, run.layout.gpus_per_node
    separate = f"vLLM has {section.hosts} separate hosts"
    if section.transport in ("ipc", "files", "adapter"):
        yield "transport", f"{section.transport} works within one host, but {separate}: null"
    if not section.engine_gpus and run.hardware.gpu != "cpu":
        yield "engine_gpus", f"0 shares the GPUs of training, but {separate}: 1"
    elif section.in_turn:
        yield "in_turn", f"true shares the GPUs of training, but {separate}: null"
    if engines(run) > section.prompts:
        several = f" with {section.engines} engines each" if section.engines > 1 else ""
        limit = f"each engine needs one of the {section.prompts} prompts of a step"
        yield "hosts", f"{section.hosts}{several}, but {limit}: {section.prompts // section.engines} at most"
    # On a CPU an engine of several processes counts as one, as it is a rehearsal.
    of_each = section.engine_gpus if run.hardware.gpu != "cpu" else 1
    if section.engines * max(1, of_each) > each:
        gpus = f" with {of_each} GPUs" if of_each > 1 else ""
        text = f"{section.engines}{gpus} on each of {section.hosts} separate hosts, but layout.gpus_per_node is {each}"
        yield "engines", text


def without_signal(run: Run) -> str:
    """Reason why Adam's mean of gradients cannot be read; empty if it can."""
    optimizer = run.optimizer
    if optimizer.kind != "adamw":
        return f"optimizer.kind {optimizer.kind} keeps no mean"
    if optimizer.states != "fp32":
        return f"optimizer.states {optimizer.states} keep it rounded"
    if optimizer.offload:
        return f"optimizer.offload {optimizer.offload:g} keeps it on the host"
    return "" if optimizer.beta1 else "optimizer.beta1 0 keeps no mean"


def _alone(run: Run) -> Iterator[tuple[str, str]]:
    """Yield reasons why the adapter cannot be sent to vLLM without the base."""
    others = [name for name in run.adapter.names if name not in ADAPTED]
    if run.adapter.kind != "lora":
        yield "transport", f"adapter, but adapter.kind is {run.adapter.kind}: vLLM supports only lora"
    elif others:
        yield "transport", f"adapter, but adapter.targets has {others[0]}; supported are {', '.join(ADAPTED)}"


def as_training(run: Run) -> Run:
    """The run whose training is this reinforcement learning; each optimizer step is a step of it."""
    section = run.reinforce
    if not section.steps:
        raise Fault("reinforce.steps: 0, so the stage is disabled; set a number of steps, such as 30")
    every = run.checkpoint.save_every
    if isinstance(every, float):
        every = math.ceil(every * section.steps)
    assert isinstance(every, int), "contradictions() refuses epochs"
    batch = section.prompts * section.samples // section.updates
    data = run.paths.prompts if section.source else run.paths.data
    training = schedule.of_steps(run, section.steps * section.updates)
    without_ramp = dict.fromkeys(batch_ramp.KEYS)
    return training.changed(
        train={**without_ramp, "global_batch": batch, "ema_decay": None, "z_loss": 0.0, "seed": section.seed},
        optimizer={"lr": section.lr, "min_lr": section.lr, "decay": "constant"},
        checkpoint={"save_every": every * section.updates},
        # The multi-token-prediction head would learn from all samples, whatever their rewards.
        model={"mtp_loss_scale": 0.0},
        # Rewards do not depend on the load of experts: balancing applies only if the user sets it.
        moe={"aux_loss_coeff": run.moe.aux_loss_coeff or 0.0},
        data={"source": section.source} if section.source else {},
        paths={"output": run.paths.reinforced, "data": data, "parity": f"{run.paths.reinforced}/parity.json"},
    )


def is_policy(run: Run) -> bool:
    """Whether the run is a result of as_training()."""
    return run.paths.output == run.paths.reinforced
