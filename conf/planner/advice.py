"""One line for a plan that is refused: the reason, and the keys that make it a plan that fits."""

from conf.planner.search import Found, changes
from conf.planner.verdict import WITH_LORA, Plan
from conf.schema.run import Run

NAMED = 2  # layouts that fit, the fastest of them


def refusal(plan: Plan) -> str:
    assert not plan.fits
    why = "; ".join(plan.problems) if plan.problems else plan.verdict.removeprefix("refused: ")
    return f"{why}. {_instead(plan)}"


def _instead(plan: Plan) -> str:
    there = f"{plan.run.world} {plan.gpu.name}"
    if plan.not_searched:
        return f"Nothing else was looked for: {plan.not_searched}"
    assert plan.found
    lora = plan.with_lora and plan.with_lora.fitting
    if plan.found.fitting and not lora:
        return f"On {there} fits: {_fitting(plan.run, plan.found)}"
    if plan.with_lora and lora:
        room = " with room" if plan.found.fitting else ""
        return f"No layout of {there} fits{room}; with {WITH_LORA} does: {_fitting(plan.run, plan.with_lora)}"
    if plan.with_packed:
        base, packed = plan.with_packed
        return f"No layout of {there} fits; with model.base={base} does: {_fitting(plan.run, packed)}"
    closest = plan.found.closest
    lacks = f"; the closest, {changes(plan.run, closest.applied(plan.run))}, {closest.verdict}" if closest else ""
    return f"No layout of {there} fits{lacks}; take more or larger GPUs"


def _fitting(run: Run, found: Found) -> str:
    return ", or ".join(changes(run, one.applied(run)) or "this layout" for one in found.offered[:NAMED])
