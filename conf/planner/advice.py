"""One line for a refused plan: the reason, and keys with which the run fits."""

from conf.planner.search import Found, changes
from conf.planner.verdict import Plan
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
    own = plan.instead[""]
    for keys, found in plan.instead.items():
        if keys and found.fitting:
            room = " with room" if own.fitting else ""
            return f"No layout of {gpus} fits{room}; with {keys} does: {_fitting(plan.run, found)}"
    if own.fitting:
        return f"This fits on {gpus}: {_fitting(plan.run, own)}"
    closest = own.closest
    lacks = f"; the closest, {changes(plan.run, closest.applied(plan.run))}, {closest.verdict}" if closest else ""
    return f"No layout of {gpus} fits{lacks}; take more or larger GPUs"


def _fitting(run: Run, found: Found) -> str:
    return ", or ".join(changes(run, layout.applied(run)) or "this layout" for layout in found.offered[:NAMED])
