"""Build the Megatron model and optimizer of a run's layout without GPUs, for any number of GPUs, and count them.

    python -m trainer.rehearse CONF [--all] [--steps N] [--json] [key=value ...]

One rank of each pipeline stage, or every rank with --all, is built without memory (trainer/rehearsal/meta_model.py),
after Megatron has checked the configuration as before training. Its parameters are compared, kind by kind, with
conf/planner/parameters.py, and the bytes of gradients and optimizer with conf/planner/memory.py. It reads the same
config.json as the plan. With --steps, a scaled-down twin of the run also takes real steps on this CPU
(trainer/rehearsal/scaled_down.py).

Exit code 0: all is equal. 1: Megatron refuses the layout, counts differ, Megatron builds a layout that
conf/rules/layout.py refuses because it trains wrongly, or the twin fails. 2: the arguments are wrong.

FP8, optimizer states in types other than fp32, and offloading are left out, and the answer says so.

Not covered: faults that appear only with data (the shapes of a packed row), kernels that need a GPU, activations.
"""

# pyright: reportArgumentType=false

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from conf.load import load
from conf.model_facts import ModelFacts
from conf.planner import hardware, parameters, verdict
from conf.planner.memory import memory
from conf.rules.layout import problems
from conf.schema.run import Run
from contract import closed_pipe
from contract.faults import Fault
from trainer.rehearsal import meta_model
from trainer.startup import entry

COUNTED = (*parameters.KINDS, *meta_model.TRAINED, *meta_model.STATES)
STATES_OF_A_PARAMETER = 12  # bytes, at most


def main() -> int:
    options = _arguments()
    with entry.faults_in_one_line():
        if options.steps < 0:
            raise Fault(f"--steps: {options.steps} is negative; 0 takes no steps")
        run = load(options.conf, options.overrides, illegal=True)
        config, place = verdict.config_of(run)
        facts = verdict.facts_in(config, place)
        run = verdict.settle(run, facts, hardware.of(run))
        answer = {"twin": _twin(run, config, options.steps) if options.steps else None}
        meta_model.prepare()
    answer |= rehearse(run, config, facts, options.all)
    answer["text"] = list(lines(answer))
    print(json.dumps(answer, indent=1) if options.json else "\n".join(answer["text"]))
    return 0 if answer["equal"] and not (answer["twin"] or {}).get("failed") else 1


def rehearse(run: Run, config: dict[str, Any], facts: ModelFacts, every: bool = False) -> dict[str, Any]:
    answer: dict[str, Any] = {"world": run.world, "equal": False, "refused": None, "stricter": [], "ranks": []}
    broken = problems(run, facts)
    run, answer["without"] = plainly(run)
    try:
        counts = {rank: meta_model.count(run, config, rank) for rank in ranks(run, every)}
    except meta_model.Refused as refusal:
        return answer | {"refused": str(refusal)}
    if broken:
        return answer | {"stricter": broken}
    expected = holdings(run, facts)
    for rank, count in counts.items():
        stage = rank // (run.world // run.layout.pp)
        differs = differences(count, expected[stage])
        row = {"rank": rank, "stage": stage, "found": count, "planned": expected[stage], "differs": differs}
        answer["ranks"].append(row)
    return answer | {"equal": not any(row["differs"] for row in answer["ranks"])}


def plainly(run: Run) -> tuple[Run, list[str]]:
    """Return the run without settings that need GPU kernels or host memory, and the keys of those settings."""
    left_out = {"train": {"fp8": None, "fp8_weights": False}, "optimizer": {"states": "fp32", "offload": 0.0}}
    keys = []
    for section, values in left_out.items():
        before = getattr(run, section)
        keys += [f"{section}.{key}" for key, value in values.items() if getattr(before, key) != value]
    return run.changed(**left_out), keys


def differences(counted: Counter[str], planned: Counter[str]) -> list[str]:
    """Return the kinds that differ from the plan, which does not know the rank whose optimizer part has the padding."""
    slack = {"optimizer": STATES_OF_A_PARAMETER * counted[meta_model.PADDING]}
    return [kind for kind in COUNTED if abs(counted[kind] - planned[kind]) > slack.get(kind, 0)]


def lines(answer: dict[str, Any]) -> Iterator[str]:
    if scaled_down := answer["twin"]:
        losses = ", ".join(f"{loss:.4f}" for loss in scaled_down["losses"])
        yield (
            f"the twin failed: {scaled_down['failed']}"
            if scaled_down["failed"]
            else f"twin on {scaled_down['on']}: losses {losses}"
        )
    if answer["refused"]:
        yield f"refused by Megatron: {answer['refused']}"
    for line in answer["stricter"]:
        yield f"refused, though Megatron would build it: {line}"
    if answer["without"] and not answer["refused"]:
        yield f"without {', '.join(answer['without'])}"
    for rank in answer["ranks"]:
        counted, planned = rank["found"], rank["planned"]
        total = sum(counted[kind] for kind in parameters.KINDS)
        yield f"rank {rank['rank']}, stage {rank['stage']}: {total:,} parameters"
        for kind in COUNTED:
            if counted[kind] or planned[kind]:
                unit = " bytes" if kind in meta_model.STATES else ""
                note = f"   planned: {planned[kind]:,}" if kind in rank["differs"] else ""
                yield f"    {kind:17} {counted[kind]:>20,}{unit}{note}"
        if counted[meta_model.PADDING]:
            yield f"    and {counted[meta_model.PADDING]:,} numbers of padding among the gradients"
    if answer["ranks"]:
        verdict = "equal" if answer["equal"] else "NOT EQUAL"
        yield f"{verdict}: {len(answer['ranks'])} of {answer['world']} ranks built and counted"


def _twin(run: Run, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train the scaled-down run. It must come first: ranks are forked from a process without a process group."""
    from trainer.rehearsal import forked_ranks, scaled_down

    forked_ranks.import_all()
    from trainer import convert, train

    try:
        small, losses = scaled_down.train(run, config, steps, convert.main, train.main)
    except RuntimeError as error:
        return {"failed": str(error), "on": "", "losses": []}
    whole = len(losses) == steps and all(map(math.isfinite, losses))
    cut = " ".join(
        f"{key} {value}"
        for key, value in small.layout
        if value is not None and key not in ("nodes", "gpus_per_node", "auto")
    )
    on = f"{small.layout.world} processes ({cut})"
    return {"failed": "" if whole else f"{on}: losses {losses}", "on": on, "losses": losses}


def ranks(run: Run, every: bool = False) -> range:
    """Return the ranks to build: the first of each pipeline stage, or all. Core numbers ranks stage by stage."""
    return range(0, run.world, 1 if every else max(1, run.world // run.layout.pp))


def holdings(run: Run, facts: ModelFacts) -> dict[int, Counter[str]]:
    """Return the parameters that each rank of a pipeline stage holds and trains, from the planner's arithmetic."""
    counts: dict[int, Counter[str]] = {}
    same_ranks = run.layout.ep == 1 and run.layout.etp == run.layout.tp
    for stage in parameters.stages(run, facts):
        dense, experts = parameters.trainable(run, facts, stage)
        trained = (dense + experts, 0) if same_ranks else (dense, experts)
        held = parameters.held(run, facts, stage) | dict(zip(meta_model.TRAINED, trained, strict=True))
        counts.setdefault(stage.rank, Counter()).update(held)
    for stage in memory(run, facts, hardware.GPUS["h100"]):  # any GPU: its size has no effect on states
        counts[stage.rank].update({kind: getattr(stage, kind) for kind in meta_model.STATES})
    return counts


def _arguments() -> argparse.Namespace:
    parser = entry.parser_of_run("trainer.rehearse", __doc__, "layout.tp=2 layout.nodes=8")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="real steps of a scaled-down twin")
    parser.add_argument("--json", action="store_true", help="for programs: one line")
    parser.add_argument("--all", action="store_true", help="build every rank, not only the first of each stage")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    closed_pipe.run(main)
