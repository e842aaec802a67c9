"""One line for a refused plan: the reason, and keys with which the run fits."""

from conf.planner.search import Found, changes
from conf.planner.verdict import WITH_LORA, Plan
from conf.schema.run import Run

NAMED = 2  # number of fitting layouts in the line, the fastest first


def refusal(plan: Plan) -> str:
    assert not plan.fits
    why = "; ".join(plan.problems) if plan.problems else plan.verdict.removeprefix("refused: ")
    return f"{why}. {_instead(plan)}"


def _instead(plan: Plan) -> str:
    gpus = f"{plan.run.world} {plan.gpu.name}"
    if plan.not_searched:
        return f"No other layout was searched: {plan.not_searched}"
    assert plan.found
    lora = plan.with_lora and plan.with_lora.fitting
    if plan.found.fitting and not lora:
        return f"This fits on {gpus}: {_fitting(plan.run, plan.found)}"
    if plan.with_lora and lora:
        room = " with room" if plan.found.fitting else ""
        return f"No layout of {gpus} fits{room}; with {WITH_LORA} does: {_fitting(plan.run, plan.with_lora)}"
    if plan.with_packed:
        base, packed = plan.with_packed
        return f"No layout of {gpus} fits; with model.base={base} does: {_fitting(plan.run, packed)}"
    closest = plan.found.closest
    lacks = f"; the closest, {changes(plan.run, closest.applied(plan.run))}, {closest.verdict}" if closest else ""
    return f"No layout of {gpus} fits{lacks}; take more or larger GPUs"


def _fitting(run: Run, found: Found) -> str:
    return ", or ".join(changes(run, layout.applied(run)) or "this layout" for layout in found.offered[:NAMED])
