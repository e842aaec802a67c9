"""Report of a run, for people: a table in the terminal, and a page in Prefect with the loss and the answers."""

import base64
import json

from prefect.artifacts import create_markdown_artifact

from conf.planner.verdict import Plan
from conf.schema.run import Run
from contract.amounts import clock
from tasks.gang.history import prefect_page as gang
from tasks.gang.history import timeline
from tasks.pages import data_report
from tasks.pages.markdown import code, table, words
from tasks.run.artifact import Artifact, Stage
from tasks.run.outcomes import Outcome, Outcomes
from tasks.run.run_tracking import RunTracking
from tasks.stages import plan
from tasks.store import Store
from tasks.tracking.address import public

ANSWERS = 8  # shown on the page; MLflow has the whole table

Made = dict[str, Artifact]  # by the name of the stage


def lines(outcomes: Outcomes, places: dict[str, str]) -> list[str]:
    """Lines of the report for the terminal."""
    made = outcomes.made
    rows = [("stage", "state", "time", "artifact")]
    for name in outcomes.stages:
        if outcome := outcomes.by_stage.get(name):
            key = outcome.artifact.key if outcome.artifact else ""
            rows.append((name, outcome.state, f"{outcome.seconds:.1f} s", key))
        else:
            rows.append((name, "NotRun", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    found = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if gains := _gains(made):
        width = max(len(name) for name, _, _ in gains)
        found += ["", f"{'metric'.ljust(width)}  {'base':>9}  {'tuned':>9}"]
        found += [f"{name.ljust(width)}  {base:>9.4g}  {tuned:>9.4g}" for name, base, tuned in gains]
    if promoted := made.get("promote"):
        result = promoted.result
        title = f"{result['model']} version {result['version']}: {' and '.join(result['aliases'])}."
        found += ["", f"{title} {result['reason']}"]
    found += ["", *(f"{name}: {where}" for name, where in places.items())]
    return found


def page(name: str, planned: Plan, outcomes: Outcomes, places: dict[str, str], store: Store) -> str:
    """The report in Markdown."""
    made = outcomes.made
    text = [f"# {name}", "", "| stage | state | time | made in | artifact |", "|---|---|---|---|---|"]
    for name in outcomes.stages:
        if outcome := outcomes.by_stage.get(name):
            one = outcome.artifact
            took = clock(one.made["seconds"]) if one else ""
            where = f"`{one.key}`" if one else outcome.reason.replace("|", "\\|").replace("\n", " ")
            text.append(f"| {name} | {outcome.state} | {clock(outcome.seconds)} | {took} | {where} |")
    text += ["", "## Plan", "", f"{words(planned.verdict)}.", *_plan(outcomes.by_stage, planned)]
    if data := _data(store, made):
        text += ["", "## Data", "", f"{data_report.headline(data)}."]
        text += ["", *(f"- {words(line)}" for line in data.get("warnings", []))]
    if gains := _gains(made):
        text += ["", "## Evaluation", "", "| metric | base | tuned |", "|---|---|---|"]
        text += [f"| {name} | {base:.4g} | {tuned:.4g} |" for name, base, tuned in gains]
    if promoted := made.get("promote"):
        result = promoted.result
        title = f"**{result['model']} version {result['version']}**: {' and '.join(result['aliases'])}."
        text += ["", f"{title} {result['reason']}"]
    if answers := _answers(store, made):
        text += ["", "| prompt | base | tuned | reference |", "|---|---|---|---|"]
        text += ["| " + " | ".join(code(cell) for cell in row) + " |" for row in answers[:ANSWERS]]
    if image := _loss(store, made):
        text += [
            "",
            "## Training",
            "",
            f"![loss](data:image/png;base64,{image})",
            *_gang(store, outcomes.stages["train"]),
        ]
    text += ["", "## Where", "", *(f"- {name}: {_link(where)}" for name, where in places.items())]
    text += ["- Prefect, MLflow and the store keep all of it; `python -m flows.artifacts show` has the lineage"]
    return "\n".join(text) + "\n"


def _plan(outcomes: dict[str, Outcome], planned: Plan) -> list[str]:
    """Plan beside the measured figures, unless those are of another time, and maybe of another layout."""
    made = {name: one.artifact for name, one in outcomes.items() if one.state == "Completed" and one.artifact}
    return table(
        ("", "planned", "measured", "measured / planned"),
        [(name, f"{was:.3g}", f"{found:.3g}", f"{found / was:.2f}") for name, was, found in plan.beside(planned, made)],
    )


def _data(store: Store, made: Made) -> dict:
    text = _file(store, made.get("prepare"), "report.json")
    return json.loads(text) if text else {}


def _gains(made: Made) -> list[tuple[str, float, float]]:
    before, after = made.get("evaluate-base"), made.get("evaluate-tuned")
    if not before or not after:
        return []
    base, tuned = before.result["metrics"], after.result["metrics"]
    return [(name, base[name], tuned[name]) for name in tuned if name in base and not name.endswith("_stderr")]


def _answers(store: Store, made: Made) -> list[tuple[str, str, str, str]]:
    found = []
    for name in ("evaluate-base", "evaluate-tuned"):
        text = _file(store, made.get(name), "results.json")
        found.append(json.loads(text)["samples"] if text else {})
    base, tuned = found
    return [
        (one["prompt"], one["answer"], other["answer"], one["reference"])
        for task in base
        for one, other in zip(base[task], tuned.get(task, []), strict=False)
    ]


def _loss(store: Store, made: Made) -> str:
    image = _file(store, made.get("train"), "loss.png")
    return base64.b64encode(image).decode() if image else ""


def _file(store: Store, made: Artifact | None, name: str) -> bytes | None:
    found = store.read(f"{made.key}/files/{name}") if made else None
    return found[0] if found else None


def _gang(store: Store, trained: Stage) -> list[str]:
    """Lines about the gang, where the training took several hosts."""
    told = timeline.read(store, trained.key.replace("/", "-"))
    return ["", gang.brief(told)] if told and told.attempts else []


def _places(run: Run, made: Made, store: Store, tracking: RunTracking) -> dict[str, str]:
    places = {"store": store.uri}
    if tuned := made.get("export"):
        alone = tuned.result["uri"] == tuned.result.get("adapter")
        places["adapter" if alone else "merged model"] = tuned.result["uri"]
    uri = public(tracking.uri)
    where = f"experiment {run.track.experiment}" if uri.startswith("http") else "make up shows it"
    return places | {"MLflow": tracking.link() or f"{uri} ({where})"}


def _link(where: str) -> str:
    return f"[{where}]({where})" if where.startswith("http") else f"`{where}`"


def publish(planned: Plan, outcomes: Outcomes, store: Store, tracking: RunTracking) -> None:
    """Publish the page as a Prefect artifact, the table in the terminal, and the figures of the whole in MLflow."""
    made, name = outcomes.made, tracking.name
    places = _places(planned.run, made, store, tracking)
    text = page(name, planned, outcomes, places, store)
    create_markdown_artifact(text, key=f"report-{planned.run.name}", description=name)
    for metric, base, tuned in _gains(made):
        tracking.tell({f"base/{metric}": base, f"tuned/{metric}": tuned})
    if trained := made.get("train"):
        tracking.tell({key: value for key, value in trained.result.items() if isinstance(value, int | float)})
    print("\n".join(["", *lines(outcomes, places), ""]))
