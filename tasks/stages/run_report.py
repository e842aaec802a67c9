"""Report of a run: a table in the terminal, a page in Prefect (run_page.py), figures in MLflow, a Result for Python."""

from dataclasses import dataclass

from prefect.artifacts import create_markdown_artifact

from conf.planner.verdict import Plan
from conf.schema.run import Run
from tasks.pages.markdown import digits
from tasks.run.outcomes import Outcomes
from tasks.run.run_tracking import RunTracking
from tasks.stages import run_page
from tasks.stages.run_page import Made
from tasks.store import Store
from tasks.tracking.address import public

# Names in MLflow, whose sections are in alphabetical order: evaluation, then the loss (tasks/tracking/metrics.yaml).
TRAINED = {
    "loss": "loss/training",
    "validation_loss": "loss/validation",
    "validation_perplexity": "loss/validation_perplexity",
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
    if gains := run_page.gains(made):
        width = max(len(name) for name, _, _ in gains)
        found += ["", f"{'metric'.ljust(width)}  {'base':>9}  {'tuned':>9}"]
        found += [f"{name.ljust(width)}  {digits(base, 4):>9}  {tuned:>9.4g}" for name, base, tuned in gains]
    if promoted := made.get("promote"):
        result = promoted.result
        title = f"{result['model']} version {result['version']}: {' and '.join(result['aliases'])}."
        found += ["", f"{title} {result['reason']}"]
    found += ["", *(f"{name}: {where}" for name, where in links.items())]
    if command := run_page.serving(made):
        found += [f"serve it: {command}"]
    return found


def publish(planned: Plan, outcomes: Outcomes, store: Store, tracking: RunTracking) -> None:
    """Publish the page in Prefect, the table in the terminal, and the figures of the run in MLflow."""
    made, name = outcomes.made, tracking.name
    links = _links(planned.run, made, store, tracking)
    text = run_page.page(name, planned, outcomes, links, store)
    create_markdown_artifact(text, key=f"report-{planned.run.name}", description=name)
    tracking.describe(run_page.verdict(made))
    for metric, base, tuned in run_page.gains(made):
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
    if promoted := made.get("promote"):
        links["MLflow, the registered version"] = pages.version(promoted.result["model"], promoted.result["version"])
    return links


def result(outcomes: Outcomes, store: Store, tracking: RunTracking) -> Result:
    made = {name: outcomes.made[name] for name in outcomes.stages if name in outcomes.made}
    gains = run_page.gains(made)
    promoted = made["promote"].result if "promote" in made else {}
    run, pages = tracking.own_run() or tracking.training_run(), tracking.pages()
    return Result(
        name=tracking.name,
        artifacts={name: store.link(f"{artifact.key}/files") for name, artifact in made.items()},
        base={name: base for name, base, _ in gains if base is not None},
        tuned={name: tuned for name, _, tuned in gains},
        model=promoted.get("model"),
        version=promoted.get("version"),
        aliases=tuple(promoted.get("aliases", ())),
        reason=promoted.get("reason", ""),
        mlflow_run=run,
        mlflow_url=pages.run(run) if run and pages else None,
    )
