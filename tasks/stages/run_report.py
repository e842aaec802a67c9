"""Report of a run, for people: a table in the terminal, and a page in Prefect with the loss and the answers."""

import base64
import json

from prefect.artifacts import create_markdown_artifact

from conf.planner.verdict import Plan
from tasks.gang.history import prefect_page as gang
from tasks.gang.history import timeline
from tasks.pages import data_report
from tasks.pages.markdown import code, table, words
from tasks.run.artifact import Artifact
from tasks.run.progress import clock
from tasks.run.session import Session
from tasks.stages import plan
from tasks.tracking.address import public

ANSWERS = 8  # shown on the page; MLflow has the whole table


def lines(session: Session) -> list[str]:
    """Lines of the report for the terminal."""
    rows = [("stage", "state", "time", "artifact")]
    for name in session.stages:
        if outcome := session.outcomes.get(name):
            key = outcome.artifact.key if outcome.artifact else ""
            rows.append((name, outcome.state, f"{outcome.seconds:.1f} s", key))
        else:
            rows.append((name, "NotRun", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    found = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if gains := _gains(session):
        width = max(len(name) for name, _, _ in gains)
        found += ["", f"{'metric'.ljust(width)}  {'base':>9}  {'tuned':>9}"]
        found += [f"{name.ljust(width)}  {base:>9.4g}  {tuned:>9.4g}" for name, base, tuned in gains]
    if promoted := _artifact(session, "promote"):
        result = promoted.result
        title = f"{result['model']} version {result['version']}: {' and '.join(result['aliases'])}."
        found += ["", f"{title} {result['reason']}"]
    found += ["", *(f"{name}: {where}" for name, where in _places(session).items())]
    return found


def page(session: Session, planned: Plan) -> str:
    """The report in Markdown."""
    text = [f"# {session.name}", "", "| stage | state | time | made in | artifact |", "|---|---|---|---|---|"]
    for name in session.stages:
        if outcome := session.outcomes.get(name):
            made = outcome.artifact
            took = clock(made.made["seconds"]) if made else ""
            where = f"`{made.key}`" if made else outcome.reason.replace("|", "\\|").replace("\n", " ")
            text.append(f"| {name} | {outcome.state} | {clock(outcome.seconds)} | {took} | {where} |")
    text += ["", "## Plan", "", f"{words(planned.verdict)}.", *_plan(session, planned)]
    if data := _data(session):
        text += ["", "## Data", "", f"{data_report.headline(data)}."]
        text += ["", *(f"- {words(line)}" for line in data.get("warnings", []))]
    if gains := _gains(session):
        text += ["", "## Evaluation", "", "| metric | base | tuned |", "|---|---|---|"]
        text += [f"| {name} | {base:.4g} | {tuned:.4g} |" for name, base, tuned in gains]
    if promoted := _artifact(session, "promote"):
        result = promoted.result
        title = f"**{result['model']} version {result['version']}**: {' and '.join(result['aliases'])}."
        text += ["", f"{title} {result['reason']}"]
    if answers := _answers(session):
        text += ["", "| prompt | base | tuned | reference |", "|---|---|---|---|"]
        text += ["| " + " | ".join(code(cell) for cell in row) + " |" for row in answers[:ANSWERS]]
    if image := _loss(session):
        text += ["", "## Training", "", f"![loss](data:image/png;base64,{image})", *_gang(session)]
    text += ["", "## Where", "", *(f"- {name}: {_link(where)}" for name, where in _places(session).items())]
    text += ["- Prefect, MLflow and the store keep all of it; `python -m flows.artifacts show` has the lineage"]
    return "\n".join(text) + "\n"


def _artifact(session: Session, name: str) -> Artifact | None:
    outcome = session.outcomes.get(name)
    return outcome.artifact if outcome else None


def _plan(session: Session, planned: Plan) -> list[str]:
    """Plan beside the measured figures, unless those are of another time, and maybe of another layout."""
    outcome = session.outcomes.get("train")
    if not outcome or outcome.state != "Completed" or not outcome.artifact:
        return []
    rows = plan.beside(planned, outcome.artifact.result)
    return table(
        ("", "planned", "measured", "measured / planned"),
        [(name, f"{was:.3g}", f"{found:.3g}", f"{found / was:.2f}") for name, was, found in rows],
    )


def _data(session: Session) -> dict:
    made = _artifact(session, "prepare")
    text = session.store.read(f"{made.key}/files/report.json") if made else None
    return json.loads(text[0]) if text else {}


def _gains(session: Session) -> list[tuple[str, float, float]]:
    before, after = _artifact(session, "evaluate-base"), _artifact(session, "evaluate-tuned")
    if not before or not after:
        return []
    base, tuned = before.result["metrics"], after.result["metrics"]
    return [(name, base[name], tuned[name]) for name in tuned if name in base and not name.endswith("_stderr")]


def _answers(session: Session) -> list[tuple[str, str, str, str]]:
    found = []
    for name in ("evaluate-base", "evaluate-tuned"):
        made = _artifact(session, name)
        text = session.store.read(f"{made.key}/files/results.json") if made else None
        found.append(json.loads(text[0])["samples"] if text else {})
    base, tuned = found
    return [
        (one["prompt"], one["answer"], other["answer"], one["reference"])
        for task in base
        for one, other in zip(base[task], tuned.get(task, []), strict=False)
    ]


def _loss(session: Session) -> str:
    made = _artifact(session, "train")
    image = session.store.read(f"{made.key}/files/loss.png") if made else None
    return base64.b64encode(image[0]).decode() if image else ""


def _gang(session: Session) -> list[str]:
    """Lines about the gang, where the training took several hosts."""
    told = timeline.read(session.store, session.stages["train"].key.replace("/", "-"))
    return ["", gang.brief(told)] if told and told.attempts else []


def _places(session: Session) -> dict[str, str]:
    places = {"store": session.store.uri}
    if tuned := _artifact(session, "export"):
        places["merged model"] = tuned.result["uri"]
    uri = public(session.tracking_uri)
    where = f"experiment {session.run.track.experiment}" if uri.startswith("http") else "make up shows it"
    return places | {"MLflow": session.link() or f"{uri} ({where})"}


def _link(where: str) -> str:
    return f"[{where}]({where})" if where.startswith("http") else f"`{where}`"


def publish(session: Session, planned: Plan) -> None:
    """Publish the page as a Prefect artifact, the table in the terminal, and the figures of the whole in MLflow."""
    create_markdown_artifact(page(session, planned), key=f"report-{session.run.name}", description=session.name)
    for name, base, tuned in _gains(session):
        session.tell({f"base/{name}": base, f"tuned/{name}": tuned})
    if trained := _artifact(session, "train"):
        session.tell({key: value for key, value in trained.result.items() if isinstance(value, int | float)})
    print("\n".join(["", *lines(session), ""]))
