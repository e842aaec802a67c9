"""Prefect's report of a run in Markdown: answers of the tuned model, the training, and how to serve the result.

On a screen of 1,280 pixels, Prefect shows about 720 pixels of a table and cuts off the rest. So cells have text that
wraps.
"""

import json
import re

from conf.load import as_yaml
from conf.planner import display, picture
from conf.planner.verdict import Plan
from conf.rules import gpus
from conf.schema.run import Run
from contract.amounts import dollars
from tasks.gang.history import prefect_page as gang
from tasks.gang.history import timeline
from tasks.pages import data_report
from tasks.pages.markdown import digits, embedded, fenced, render, table, words
from tasks.run.artifact import Artifact
from tasks.run.outcomes import Outcomes
from tasks.stages import plan
from tasks.store import Store

PICTURES = ("training.png", "loss.png")  # older trainings have loss.png
PATHS = re.compile(r"^paths:\n(?: .*\n)*", re.MULTILINE)  # paths of this host in a configuration

Made = dict[str, Artifact]  # by the name of the stage


def page(name: str, planned: Plan, outcomes: Outcomes, links: dict[str, str], store: Store) -> str:
    """Return the report. `links` are addresses or paths by title."""
    made, image = outcomes.made, None
    for file in PICTURES:
        image = image or _file(store, made.get("train"), file)
    # Cached stages are not compared with the plan: they may have had another layout.
    ended = {name: one.artifact for name, one in outcomes.by_stage.items() if one.state == "Completed" and one.artifact}
    return render(
        "run",
        name=name,
        headline=_headline(made),
        answers=_answers(store, made),
        evaluation=_evaluation(made),
        image=image and embedded("training", image),
        gang=timeline.read(store, outcomes.stages["train"].key.replace("/", "-")),
        brief=gang.brief,
        facts=_facts(planned, made, store),
        links=links,
        outcomes=outcomes,
        planned=planned,
        compared=plan.beside(planned, ended),
        picture=picture.lines(planned) if planned.stages else (),
        configuration=PATHS.sub("", as_yaml(planned.run)).rstrip(),
    )


def verdict(made: Made) -> str:
    """Return a short report: whether and why the model was promoted, and its metrics."""
    headline, *command = _headline(made)
    return "\n".join([headline, *_evaluation(made), *command])


def _evaluation(made: Made) -> list[str]:
    rows = [(words(name), digits(tuned, 4), digits(base, 4)) for name, base, tuned in gains(made)]
    return table(("metric", "tuned", "base"), rows)


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
    if promoted := made.get("promote"):
        result = promoted.result
        return f"python -m flows.serve {result['model']}@{result['version']}"
    return f"python -m flows.serve {made['export'].key}" if "export" in made else ""


def _headline(made: Made) -> list[str]:
    if promoted := made.get("promote"):
        result = promoted.result
        title = f"{result['model']} version {result['version']}"
        text = [f"**{words(title)}** is {' and '.join(result['aliases'])}: {words(result['reason'])}."]
    else:
        text = ["Nothing was registered."]
    return text + (["", fenced(command)] if (command := serving(made)) else [])


def _facts(planned: Plan, made: Made, store: Store) -> list[tuple[str, str]]:
    run, layout, train = planned.run, planned.run.layout, planned.run.train
    revision = f", revision {run.model.revision}" if run.model.revision else ""
    sources = ", ".join(str(part.source) for part in run.data.mixture or (run.data,))
    rows = [("model", f"{run.model.source}{revision}"), ("data", sources)]
    if data := _data(store, made):
        rows.append(("rows", data_report.headline(data)))
        rows += [("worth a look", line) for line in data.get("warnings", [])]
    rows.append(("trained", _trained(run)))
    rows.append(("steps", f"{train.steps} of {train.global_batch} sequences of {run.data.seq_length} tokens"))
    rows.append(("learning rate", f"{run.optimizer.lr:g}"))
    rows.append(("hardware", f"{layout.world} {planned.gpu.name}: {display.degrees(layout)}"))
    rows += _spent(planned, made)
    if tuned := made.get("export"):
        kinds = {"adapter": tuned.result.get("adapter"), "merged model": tuned.result["uri"]}
        kinds |= {"merged model": None} if tuned.result["uri"] == tuned.result.get("adapter") else {}
        rows += [(kind, where) for kind, where in kinds.items() if where]
    if promoted := made.get("promote"):
        rows.append(("registered", f"{promoted.result['model']} version {promoted.result['version']}"))
    return rows


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
        cost = {name: hours * _processes(planned, name) * price for name, hours in of.items()}
        both = dollars(cost["train"]), dollars(sum(cost.values()))
        spent = f", {both[0]} USD; all stages {both[1]} USD at {price:g} per GPU and hour"
    rows = [("hours", f"{of['train']:.3g} of training, {sum(of.values()):.3g} of all stages{spent}")]
    if planned.time:
        cost = "" if planned.time.cost is None else f", {dollars(planned.time.cost)} USD"
        rows.append(("planned", f"{planned.time.hours:.3g} hours of training{cost}"))
    return rows


def _processes(planned: Plan, stage: str) -> int:
    share = gpus.takes(planned.run, stage)
    return share.of(planned.gpu.per_host) * (1 if share.here else share.hosts)


def _data(store: Store, made: Made) -> dict:
    text = _file(store, made.get("prepare"), "report.json")
    return json.loads(text) if text else {}


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
