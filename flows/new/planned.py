"""Layout of a new configuration, by the planner's search, and its plan. Without named GPUs: the fewest that fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from conf.overrides import by_section
from conf.planner import advice, display, hardware
from conf.planner.hardware import CPU, GB
from conf.planner.search import Found, search
from conf.planner.verdict import Plan, plan, settle, settled_on
from conf.rules import schedule
from conf.schema.run import Run
from contract.faults import Fault
from flows.new import machine as machines
from flows.new.choices import Choices, with_layout
from flows.new.machine import Machine
from flows.new.model import Model

ON_A_CPU = 2e8  # parameters; a larger model takes hours there
KIND = "h100"  # if no GPU is named and this host has none
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Settled:
    machine: Machine
    choices: Choices
    run: Run
    plan: Plan


def settle_on(machine: Machine, model: Model, made: Callable[[Machine], Choices]) -> Settled:
    """Choose the layout on these GPUs. If none fits, a Fault names the reason and a sufficient number."""
    found = _try(machine, model, made)
    if isinstance(found, Settled):
        if not found.plan.fits:  # because of the caller's keys
            raise Fault(advice.refusal(found.plan))
        return found
    lacks = f"; the closest {found.closest.verdict}" if found.closest else ""
    if not machine.gpu.cuda:
        would = "--gpus 8xh100 plans for GPUs"
    else:
        each = machine.gpu.per_host
        more = (count for count in COUNTS if count > machine.gpus and (count <= each or count % each == 0))
        enough = next(_fitting(machine.kind, more, model, made), None)
        would = f"{enough.machine.shown} would do" if enough else "a larger GPU would do, or a smaller model"
    raise Fault(f"--gpus: no layout of {model.source} is legal and fits on {machine.shown}{lacks}; {would}")


def choose_machine(model: Model, made: Callable[[Machine], Choices]) -> Settled:
    """Choose the machine on a host without a GPU: this CPU for a small model, else the fewest H100 that fit."""
    if model.parameters < ON_A_CPU:
        why = "this host has no GPU, and the model is small"
        return settle_on(machines.parse(CPU.name, why=why), model, made)
    found = next(_fitting(KIND, iter(COUNTS), model, made), None)
    if found is None:
        raise Fault(f"--gpus: {model.source} does not fit on {COUNTS[-1]} {KIND}; name others with --gpus")
    return found


def _fitting(kind: str, counts: Iterator[int], model: Model, made: Callable[[Machine], Choices]) -> Iterator[Settled]:
    """Yield plans on more and more GPUs. Skip plans whose free memory is less than the planner's error (10%)."""
    for count in counts:
        why = f"the fewest that fit; {KIND} is a guess, as this host has no GPU: name yours with --gpus"
        found = _try(machines.parse(f"{count}x{kind}", why=why), model, made)
        if isinstance(found, Settled) and -found.plan.fullest.over > 0.1 * found.plan.fullest.total:
            yield found


def _try(machine: Machine, model: Model, made: Callable[[Machine], Choices]) -> Settled | Found:
    choices = made(machine)
    run = as_run(choices)
    gpu = hardware.of(run)
    if not any(key.startswith("layout.") for key in choices.given):
        run = run.changed(layout={"nodes": machine.nodes, "gpus_per_node": machine.per_node})
        gpu = hardware.of(run)
        found = search(run, model.facts, settled_on(run, gpu), run.world)
        if not found.fitting:
            return found
        run = found.offered[0].applied(run)
        count = len(found.fitting)
        how = f"the fastest of {count} that fit" if count > 1 else "the only one that fits"
        how = how if run.world > 1 else "one process"
        with_layout(choices, run, how)
        run = as_run(choices)  # the caller's keys win over computed ones
    run = schedule.resolved(run, choices.sequences)
    return Settled(machine, choices, run, plan(settle(run, model.facts, gpu), model.facts, gpu))


def as_run(choices: Choices) -> Run:
    return Run.model_validate(by_section({key: choice.value for key, choice in choices.made.items()}))


def told(found: Settled) -> str:
    """Return the plan as one line of text."""
    time, stage = found.plan.time, found.plan.fullest
    memory = f"{stage.total / GB:.2g} of {stage.capacity / GB:.3g} GB"
    if time is None:
        return f"{memory} of memory; {display.cpu_step(found.plan)}; {display.length(found.plan)}"
    assert time.hours is not None, "its steps are resolved"
    training = f"{time.likely:.3g} s a step, {display.duration(time.hours * 3600)} of training"
    return f"{memory} on the fullest GPU; {training}; all stages: {display.whole(found.plan, found.plan.needs)}"
