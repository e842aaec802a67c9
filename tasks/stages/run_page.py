"""Prefect's report of a run in Markdown: answers of the tuned model, the training, and how to serve the result.

On a screen of 1,280 pixels Prefect gives a table about 720 and cuts off the rest. So cells are plain words that wrap.
"""

import json
import re

from conf.load import as_yaml
from conf.planner import display, picture
from conf.planner.verdict import Plan
from conf.rules import gpus
from conf.schema.run import Run
from contract.amounts import clock, dollars
from tasks.gang.history import prefect_page as gang
from tasks.gang.history import timeline
from tasks.pages import data_report
from tasks.pages.markdown import code, embedded, fenced, fitted, table, words
from tasks.run.artifact import Artifact, Stage
from tasks.run.outcomes import Outcomes
from tasks.stages import plan
from tasks.store import Store

ANSWERS = 8  # shown on the page; MLflow has the whole table
PROMPT, ANSWER, FACT = 34, 18, 76  # characters of a line in a cell of each
PICTURES = ("training.png", "loss.png")  # older trainings have loss.png

Made = dict[str, Artifact]  # by the name of the stage


def page(name: str, planned: Plan, outcomes: Outcomes, links: dict[str, str], store: Store) -> str:
    """The report. `links` are addresses or paths by their titles."""
    made, run = outcomes.made, planned.run
    text = [f"# {words(name)}", "", *_headline(made)]
    if answers := _answers(store, made):
        text += ["", *table(("prompt", "tuned", "reference", "base"), map(_row, answers[:ANSWERS]))]
        text += ["", f"{min(ANSWERS, len(answers))} of {len(answers)} that both models answered."]
    if found := _evaluation(made):
        text += ["", "## Evaluation", *found]
    text += _training(store, made, outcomes.stages["train"])
    text += ["", "## Made of", *table(("", ""), _facts(planned, made, store))]
    text += ["", "## Where", "", *(_place(what, where) for what, where in links.items())]
    text += ["", "## Stages", *table(("stage", "state", "here", "made in", "artifact"), _stages(outcomes))]
    text += ["", "## Plan", "", f"{words(planned.verdict)}.", *_planned(outcomes, planned)]
    text += ["", fenced("\n".join(picture.lines(planned)))] if planned.stages else []
    text += ["", "## Configuration", "", "All keys with their values:", "", fenced(_configuration(run))]
    return "\n".join(text) + "\n"


def verdict(made: Made) -> str:
    """Short form of the report: whether the model was promoted and why, and its metrics."""
    headline, *command = _headline(made)
    return "\n".join([headline, *_evaluation(made), *command])


def _evaluation(made: Made) -> list[str]:
    rows = [(words(name), f"{tuned:.4g}", of_base(base)) for name, base, tuned in gains(made)]
    return table(("metric", "tuned", "base"), rows)


def gains(made: Made) -> list[tuple[str, float | None, float]]:
    """Metrics of the evaluation: name, base, tuned model. Drawn weights are not evaluated as a base."""
    before, after = made.get("evaluate-base"), made.get("evaluate-tuned")
    if not after or not (before or _is_drawn(made)):
        return []
    base, tuned = before.result["metrics"] if before else {}, after.result["metrics"]
    shown = [name for name in tuned if (name in base or not before) and not name.endswith("_stderr")]
    return [(name, base.get(name), tuned[name]) for name in shown]


def _is_drawn(made: Made) -> bool:
    return "download" in made and "seed" in made["download"].stage.config


def of_base(value: float | None) -> str:
    """The base's metric as text."""
    return "" if value is None else f"{value:.4g}"


def serving(made: Made) -> str:
    """The command that serves the result; "" if there is no model to serve."""
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


def _row(answer: tuple[str, str, str, str]) -> tuple[str, ...]:
    prompt, base, tuned, reference = answer
    mark = "✓ " if tuned.strip() == reference.strip() else ""
    shown = [fitted(text, ANSWER) or "(nothing)" for text in (tuned, reference, base)]
    return fitted(prompt, PROMPT), mark + shown[0], shown[1], shown[2]


def _training(store: Store, made: Made, trained: Stage) -> list[str]:
    image = next((found for name in PICTURES if (found := _file(store, made.get("train"), name))), None)
    if not image:
        return []
    text = embedded("training", image)
    return ["", "## Training", "", text, *_gang(store, trained)]


def _gang(store: Store, trained: Stage) -> list[str]:
    """Lines about the gang of a training on several hosts."""
    told = timeline.read(store, trained.key.replace("/", "-"))
    return ["", gang.brief(told)] if told and told.attempts else []


def _facts(planned: Plan, made: Made, store: Store) -> list[tuple[str, str]]:
    run, layout, train = planned.run, planned.run.layout, planned.run.train
    revision = f", revision {run.model.revision}" if run.model.revision else ""
    rows = [("model", fitted(f"{run.model.source}{revision}", FACT)), ("data", fitted(_sources(run), FACT))]
    if data := _data(store, made):
        rows.append(("rows", fitted(data_report.headline(data), FACT)))
        rows += [("worth a look", fitted(line, FACT)) for line in data.get("warnings", [])]
    rows.append(("trained", fitted(_trained(run), FACT)))
    rows.append(("steps", f"{train.steps} of {train.global_batch} sequences of {run.data.seq_length} tokens"))
    rows.append(("learning rate", f"{run.optimizer.lr:g}"))
    rows.append(("hardware", fitted(f"{layout.world} {planned.gpu.name}: {display.degrees(layout)}", FACT)))
    rows += [(name, fitted(value, FACT)) for name, value in _spent(planned, made)]
    if tuned := made.get("export"):
        kinds = {"adapter": tuned.result.get("adapter"), "merged model": tuned.result["uri"]}
        kinds |= {"merged model": None} if tuned.result["uri"] == tuned.result.get("adapter") else {}
        rows += [(kind, fitted(where, FACT)) for kind, where in kinds.items() if where]
    if promoted := made.get("promote"):
        rows.append(("registered", words(f"{promoted.result['model']} version {promoted.result['version']}")))
    return rows


def _sources(run: Run) -> str:
    parts = run.data.mixture or (run.data,)
    return ", ".join(str(part.source) for part in parts)


def _trained(run: Run) -> str:
    adapter = run.adapter
    if adapter.kind == "none":
        return "every weight"
    return f"{adapter.kind} of rank {adapter.rank}, alpha {adapter.alpha}, on {', '.join(adapter.names)}"


def _spent(planned: Plan, made: Made) -> list[tuple[str, str]]:
    """Hours and cost of the training and of all stages, cached ones too; and the planned values."""
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


def _stages(outcomes: Outcomes) -> list[tuple[str, ...]]:
    rows = []
    for name in outcomes.stages:
        if outcome := outcomes.by_stage.get(name):
            one = outcome.artifact
            took = clock(one.made["seconds"]) if one else ""
            where = code(one.key) if one else fitted(outcome.reason, FACT // 2)
            rows.append((name, outcome.state, clock(outcome.seconds), took, where))
    return rows


def _planned(outcomes: Outcomes, planned: Plan) -> list[str]:
    """Planned and measured figures. Cached stages are left out: they may have had another layout."""
    made = {name: one.artifact for name, one in outcomes.by_stage.items() if one.state == "Completed" and one.artifact}
    return table(
        ("", "planned", "measured", "measured / planned"),
        [(name, f"{was:.3g}", f"{found:.3g}", f"{found / was:.2f}") for name, was, found in plan.beside(planned, made)],
    )


def _configuration(run: Run) -> str:
    """All keys without the paths of this host."""
    return re.sub(r"^paths:\n(?: .*\n)*", "", as_yaml(run), flags=re.MULTILINE).rstrip()


def _data(store: Store, made: Made) -> dict:
    text = _file(store, made.get("prepare"), "report.json")
    return json.loads(text) if text else {}


def _answers(store: Store, made: Made) -> list[tuple[str, str, str, str]]:
    """Prompt, the base's answer, the tuned model's, and the reference."""
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


def _place(what: str, where: str) -> str:
    return f"- [{what}](<{where}>)" if where.startswith("http") else f"- {what}: {code(where, 300)}"
