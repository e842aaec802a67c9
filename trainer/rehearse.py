"""Build the real Megatron model of a run's layout, for any number of GPUs, on none, and count it.

    python -m trainer.rehearse CONF [--all] [--steps N] [key=value ...]

One rank of each pipeline stage, or every rank with --all, is built without memory (trainer/bare.py), after Megatron
has checked the configuration as before training. Its parameters are compared, kind by kind, with what
conf/plan/parameters.py says. The model is that of paths.model, of a tiny://KIND, or one that conf/models knows by its
source. With --steps, a scaled-down twin of the run then takes real steps on this CPU (trainer/twin.py).

Exit code 0: all counts are equal. 1: Megatron refuses the layout, counts differ, or the twin fails. 2: what was asked
is at fault.

Not covered: what only shows once data flows (the shapes of a packed row), kernels that need a GPU, memory.
"""

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from conf.facts import MODELS, facts_from_hf
from conf.load import load
from conf.plan import parameters
from conf.schema import Run
from trainer import bare, entry, tiny
from trainer.faults import Fault

TINY = "tiny://"


def main() -> int:
    options = _arguments()
    with entry.faults_in_one_line():
        if options.steps < 0:
            raise Fault(f"--steps: {options.steps} is no number of steps; 0 takes none")
        run = load(options.conf, options.overrides)
        config = config_of(run)
        try:
            facts = facts_from_hf(config)
        except ValueError as error:
            raise Fault(f"model.source: {run.model.source}: {error}") from None
        trained = _twin(run, config, options.steps) if options.steps else True
        bare.prepare()
    try:
        counts = {rank: bare.count(run, config, rank) for rank in ranks(run, options.all)}
    except bare.Refused as refusal:
        print(f"refused by Megatron: {refusal}")
        return 1
    expected = holdings(run, facts)
    equal = True
    for rank, found in counts.items():
        stage = rank // (run.world // run.layout.pp)
        equal &= _report(rank, stage, found, expected[stage])
    print(f"{'equal' if equal else 'NOT EQUAL'}: {len(counts)} of {run.world} ranks built and counted")
    return 0 if equal and trained else 1


def _twin(run: Run, config: dict[str, Any], steps: int) -> bool:
    """Before the rest, as ranks are forked from a process that has no group yet."""
    from trainer import twin

    try:
        small, losses = twin.train(run, config, steps)
    except RuntimeError as error:
        print(f"the twin failed: {error}")
        return False
    cut = " ".join(
        f"{key} {value}" for key, value in small.layout if value is not None and key not in ("nodes", "gpus_per_node")
    )
    print(f"twin on {small.layout.world} processes ({cut}): losses {', '.join(f'{loss:.4f}' for loss in losses)}")
    return len(losses) == steps and all(map(math.isfinite, losses))


def config_of(run: Run) -> dict[str, Any]:
    """The model's config.json, without its weights."""
    path, source = Path(run.paths.model) / "config.json", run.model.source
    if path.is_file():
        return _read(path)
    if source.startswith(TINY):
        kind = source.removeprefix(TINY)
        if kind not in tiny.KINDS:
            raise Fault(f"model.source: {source} is no tiny model; there are {', '.join(tiny.KINDS)}")
        return tiny.KINDS[kind]
    for file in sorted(MODELS.glob("*.json")):
        known = json.loads(file.read_text())
        if known["source"].split()[0] == source:
            return known["config"]
    raise Fault(f"model.source: {source} is in no file of conf/models, and {path} does not exist")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise Fault(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(found, dict) or not found.get("architectures"):
        raise Fault(f"{path}: architectures is missing, so the kind of model is unknown")
    return found


def ranks(run: Run, every: bool = False) -> range:
    """The first of each pipeline stage; core numbers ranks stage by stage."""
    return range(0, run.world, 1 if every else max(1, run.world // run.layout.pp))


def holdings(run: Run, facts) -> dict[int, Counter[str]]:
    """By pipeline rank, what conf/plan/parameters.py says that each of its ranks holds, and trains of it."""
    found: dict[int, Counter[str]] = {}
    same_ranks = run.layout.ep == 1 and run.layout.etp == run.layout.tp
    for stage in parameters.stages(run, facts):
        dense, experts = parameters.trainable(run, facts, stage)
        trained = (dense + experts, 0) if same_ranks else (dense, experts)
        held = parameters.held(run, facts, stage) | dict(zip(bare.TRAINED, trained, strict=True))
        found.setdefault(stage.rank, Counter()).update(held)
    return found


def _report(rank: int, stage: int, found: Counter[str], expected: Counter[str]) -> bool:
    kinds = [kind for kind in (*parameters.KINDS, *bare.TRAINED) if found[kind] or expected[kind]]
    total = sum(found[kind] for kind in parameters.KINDS)
    print(f"rank {rank}, stage {stage}: {total:,} parameters")
    for kind in kinds:
        note = "" if found[kind] == expected[kind] else f"   planned: {expected[kind]:,}"
        print(f"    {kind:17} {found[kind]:>20,}{note}")
    return found == expected


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.rehearse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("conf", help="a name (tiny), or the path of a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as layout.tp=2 layout.nodes=8")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="real steps of a scaled-down twin")
    parser.add_argument("--all", action="store_true", help="build every rank, not only the first of each stage")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(main())
