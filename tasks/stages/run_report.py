"""Report of a run: a table in the terminal, a page in Prefect, figures in MLflow, a Result for Python.

On a screen of 1,280 pixels, Prefect shows about 720 pixels of a table and cuts off the rest. So cells of the page have
text that wraps.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from prefect.artifacts import create_markdown_artifact

from conf.load import as_yaml
from conf.planner import display, picture
from conf.planner.verdict import Plan
from conf.schema.run import Run
from contract.amounts import clock, dollars
from tasks.gang.history import prefect_page as gang
from tasks.gang.history import spent, timeline
from tasks.pages import data_report
from tasks.pages.markdown import digits, embedded, render
from tasks.run import accounts
from tasks.run.accounts import Usage
from tasks.run.artifact import Artifact
from tasks.run.outcomes import Outcomes
from tasks.run.run_tracking import RunTracking
from tasks.stages import plan
from tasks.store import Store
from tasks.tracking.address import public

PICTURES = ("training.png", "loss.png")  # older trainings have loss.png
PATHS = re.compile(r"^paths:\n(?: .*\n)*", re.MULTILINE)  # paths of this host in a configuration

Made = dict[str, Artifact]  # by the name of the stage
# Names in MLflow, whose sections are in alphabetical order: evaluation, then the loss (tasks/tracking/metrics.yaml).
TRAINED = {
    "loss": "loss/training",
    "validation_loss": "loss/validation",
    "validation_perplexity": "loss/validation_perplexity",
    "packed_loss": "packing/packed_loss",
    "unpacked_loss": "packing/unpacked_loss",
    "packing_cost": "packing/cost",
    "median_step_seconds": "speed/step_seconds",
    "peak_memory_gb": "speed/memory_gb",
}


@dataclass(frozen=True)
class Result:
    """A completed run. It holds only texts and numbers, so Prefect can store it."""

    name: str  # of the flow run
    artifacts: dict[str, str]  # URIs by stage
    base: dict[str, float]  # metrics of the base model, by name
    tuned: dict[str, float]  # metrics of the tuned model
    model: str | None  # in MLflow's registry, as are the next three
    version: str | None
    aliases: tuple[str, ...]
    reason: str  # for or against the promotion
    mlflow_run: str | None  # id of this run in MLflow, or of the training if all stages were cached
    mlflow_url: str | None  # None without a server


def lines(outcomes: Outcomes, links: dict[str, str]) -> list[str]:
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
    if metrics := gains(made):
        width = max(len(name) for name, _, _ in metrics)
        found += ["", f"{'metric'.ljust(width)}  {'base':>9}  {'tuned':>9}"]
        found += [f"{name.ljust(width)}  {digits(base, 4):>9}  {tuned:>9.4g}" for name, base, tuned in metrics]
    if promoted := _promoted(made):
        title = f"{promoted['model']} version {promoted['version']}: {' and '.join(promoted['aliases'])}."
        found += ["", f"{title} {promoted['reason']}"]
    found += ["", *(f"{name}: {where}" for name, where in links.items())]
    if command := serving(made):
        found += [f"serve it: {command}"]
    return found


def publish(planned: Plan, outcomes: Outcomes, store: Store, tracking: RunTracking, spent: dict[str, float]) -> None:
    """Publish the page in Prefect, the table in the terminal, and the figures of the run in MLflow."""
    made, name = outcomes.made, tracking.name
    links = _links(planned.run, made, store, tracking)
    used = accounts.of_project(store, planned.run.track.project)
    text = page(name, planned, outcomes, links, store, used)
    create_markdown_artifact(text, key=f"report-{planned.run.name}", description=name)
    tracking.describe(verdict(made))
    costs = {"project_gpu_hours_of_month": used.gpu_hours, "project_usd_of_month": used.usd}
    tracking.whole.metrics({f"cost/{key}": value for key, value in (spent | costs).items()})
    for metric, base, tuned in gains(made):
        tracking.whole.metrics(
            {f"evaluation/tuned/{metric}": tuned} | ({} if base is None else {f"evaluation/base/{metric}": base})
        )
    if trained := made.get("train"):
        tracking.whole.metrics({told: trained.result[key] for key, told in TRAINED.items() if key in trained.result})
    print("\n".join(["", *lines(outcomes, links), ""]))


def _links(run: Run, made: Made, store: Store, tracking: RunTracking) -> dict[str, str]:
    """Links of the report by title."""
    links = {"store": store.uri}
    if tuned := made.get("export"):
        alone = tuned.result["uri"] == tuned.result.get("adapter")
        links["adapter" if alone else "merged model"] = tuned.result["uri"]
    if tracking.prefect:
        links["Prefect, this run"] = tracking.prefect
    own = tracking.own_run()
    if (pages := tracking.pages()) is None:
        uri = public(tracking.uri)
        where = f"experiment {run.track.experiment}" if uri.startswith("http") else "make up shows it"
        return links | {"MLflow": f"{uri} ({where})"}
    if own:
        links["MLflow, this run"] = pages.run(own)
    if training := pages.trainings.get(tracking.training):
        links["MLflow, curves of the training"] = pages.curves(training)
        if compared := pages.compared(training):
            links["MLflow, this training compared with earlier ones"] = compared
    links["MLflow, all trainings' losses"] = pages.charts()
    if promoted := _promoted(made):
        links["MLflow, the registered version"] = pages.version(promoted["model"], promoted["version"])
    return links


def result(outcomes: Outcomes, store: Store, tracking: RunTracking) -> Result:
    made = {name: outcomes.made[name] for name in outcomes.stages if name in outcomes.made}
    metrics = gains(made)
    promoted = _promoted(made)
    run, pages = tracking.own_run() or tracking.training_run(), tracking.pages()
    return Result(
        name=tracking.name,
        artifacts={name: store.link(f"{artifact.key}/files") for name, artifact in made.items()},
        base={name: base for name, base, _ in metrics if base is not None},
        tuned={name: tuned for name, _, tuned in metrics},
        model=promoted.get("model"),
        version=promoted.get("version"),
        aliases=tuple(promoted.get("aliases", ())),
        reason=promoted.get("reason", ""),
        mlflow_run=run,
        mlflow_url=pages.run(run) if run and pages else None,
    )


def page(name: str, planned: Plan, outcomes: Outcomes, links: dict[str, str], store: Store, used: Usage) -> str:
    """Return the report. `links` are addresses or paths by title."""
    made, image = outcomes.made, None
    for file in PICTURES:
        image = image or _file(store, made.get("train"), file)
    data = _file(store, made.get("prepare"), "report.json")
    # Cached stages are not compared with the plan: they may have had another layout.
    ended = {name: one.artifact for name, one in outcomes.by_stage.items() if one.state == "Completed" and one.artifact}
    return render(
        "run",
        name=name,
        promoted=_promoted(made),
        command=serving(made),
        metrics=gains(made),
        answers=_answers(store, made),
        image=image and embedded("training", image),
        gang=timeline.read(store, outcomes.stages["train"].key.replace("/", "-")),
        brief=gang.brief,
        made=made,
        data=data and json.loads(data),
        data_headline=data_report.headline,
        trained=_trained(planned.run),
        spent=_spent(planned, made),
        account=account(planned.run, used),
        time=_time(planned, made),
        shares=spent.text(made["train"].result.get("seconds", {})) if "train" in made else "",
        degrees=display.degrees,
        links=links,
        outcomes=outcomes,
        planned=planned,
        compared=plan.beside(planned, ended),
        picture=picture.lines(planned) if planned.stages else (),
        configuration=PATHS.sub("", as_yaml(planned.run)).rstrip(),
    )


def verdict(made: Made) -> str:
    """Return a short report: whether and why the model was promoted, and its metrics."""
    return render("verdict", promoted=_promoted(made), metrics=gains(made), command=serving(made)).rstrip("\n")


def _promoted(made: Made) -> dict[str, Any]:
    """Return the result of stage promote; empty without one."""
    return made["promote"].result if "promote" in made else {}


def gains(made: Made) -> list[tuple[str, float | None, float]]:
    """Return metrics as (name, base, tuned model). A base with random weights is not evaluated."""
    before, after = made.get("evaluate-base"), made.get("evaluate-tuned")
    is_drawn = "download" in made and "seed" in made["download"].stage.config
    if not after or not (before or is_drawn):
        return []
    base, tuned = before.result["metrics"] if before else {}, after.result["metrics"]
    shown = [name for name in tuned if (name in base or not before) and not name.endswith("_stderr")]
    return [(name, base.get(name), tuned[name]) for name in shown]


def serving(made: Made) -> str:
    """Return the command that serves the result; "" if there is no model to serve."""
    if promoted := _promoted(made):
        return f"python -m flows.serve {promoted['model']}@{promoted['version']}"
    return f"python -m flows.serve {made['export'].key}" if "export" in made else ""


def _trained(run: Run) -> str:
    adapter = run.adapter
    if adapter.kind == "none":
        return "every weight"
    return f"{adapter.kind} of rank {adapter.rank}, alpha {adapter.alpha}, on {', '.join(adapter.names)}"


def _spent(planned: Plan, made: Made) -> list[tuple[str, str]]:
    """Return hours and cost of the training and of all stages, including cached stages, and the planned values."""
    if "train" not in made:
        return []
    of = {name: one.made["seconds"] / 3600 for name, one in made.items()}
    price, spent = planned.gpu.price, ""
    if price is not None:
        cost = {name: hours * accounts.processes(planned.run, planned.gpu, name) * price for name, hours in of.items()}
        both = dollars(cost["train"]), dollars(sum(cost.values()))
        spent = f", {both[0]} USD; all stages {both[1]} USD at {price:g} per GPU and hour"
    rows = [("hours", f"{of['train']:.3g} of training, {sum(of.values()):.3g} of all stages{spent}")]
    if planned.time:
        cost = "" if planned.time.cost is None else f", {dollars(planned.time.cost)} USD"
        rows.append(("planned", f"{planned.time.hours:.3g} hours of training{cost}"))
    return rows


def account(run: Run, used: Usage) -> tuple[str, str]:
    """Return the owner of a run, and the usage of its project in this month."""
    hours = f"{used.gpu_hours:.3g} GPU hours, {dollars(used.usd)} USD in {accounts.month_of()}"
    return accounts.owner(run), f"{run.track.project}: {used.runs} runs, {hours}"


def _time(planned: Plan, made: Made) -> list[tuple[str, str, str, str]]:
    """Return rows of a training's time: category, time, GPU-hours, cost. Older trainings have none."""
    result = made["train"].result if "train" in made else {}
    price, rows = planned.gpu.price, []
    for name, seconds in result.get("seconds", {}).items():
        hours = result["gpu_seconds"][name] / 3600
        rows.append((name, clock(seconds), f"{hours:.3g}", "" if price is None else dollars(hours * price)))
    return rows


def _answers(store: Store, made: Made) -> list[tuple[str, str, str, str]]:
    """Return rows of prompt, the base's answer, the tuned model's answer and the reference answer."""
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


def _file(store: Store, made: Artifact | None, name: str) -> bytes | None:
    found = store.read(f"{made.key}/files/{name}") if made else None
    return found[0] if found else None
