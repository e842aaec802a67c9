"""Result of a run, as the flow returns it to Python code: URIs, metrics and the registered version."""

from dataclasses import dataclass

from tasks.run.outcomes import Outcomes
from tasks.run.run_tracking import RunTracking
from tasks.stages import run_page
from tasks.store import Store


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


def of(outcomes: Outcomes, store: Store, tracking: RunTracking) -> Result:
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
