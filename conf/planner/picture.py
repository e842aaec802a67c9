"""Picture of the content of each GPU: the pipeline's stages, and each GPU's share of its stage.

    lines(plan)      for a terminal: a line per stage, then a block per host; equal hosts share a block
    as_dict(plan)    the same for programs, and for the figure in MLflow

Ranks are numbered as in core: tp innermost, then cp, dp and the pipeline; in the grid of experts etp, ep, edp and the
pipeline. So the share of a GPU depends only on its place in its stage, and copies of a share (cp, dp, edp) follow each
other. All GPUs of a stage hold the same number of parameters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from conf.planner import parameters
from conf.planner.verdict import Plan
from conf.schema.run import Run
from conf.schema.sections import Layout

STAGES = 16  # maximum of lines for stages that differ only in the numbers of their layers
BLOCKS = 6  # maximum of blocks of hosts


@dataclass(frozen=True)
class Share:
    """The part of a stage that one GPU holds; shares count from 1."""

    stage: int  # of the pipeline, counted from the first stage of its host
    tp: int  # its part of tensors that tp cuts
    experts: tuple[int, int]  # its first and its last expert; (0, -1): none
    etp: int  # its part of each expert


def lines(plan: Plan) -> Iterator[str]:
    """Yield lines about a legal plan for a terminal."""
    run, facts, each = plan.run, plan.facts, _per_stage(plan.run.layout)
    fullest, whole = plan.fullest.rank, stages(plan)
    yield f"GPUs of a stage: {each}; layers by number, from 0"
    middle = len(whole) - STAGES
    for place, stage in enumerate(whole):
        if middle > 0 and STAGES // 2 <= place < STAGES // 2 + middle and stage["rank"] != fullest:
            if place == STAGES // 2:
                yield f"  ... {middle} similar stages ..."
            continue
        first, last = stage["gpus"]
        besides = "".join(f", {name}" for name in ("embedding", "mtp", "output") if stage[name])
        mark = "  * fullest" if stage["rank"] == fullest else ""
        yield f"  stage {stage['rank']:<3} GPU {span(first, last):<11} layers {_spans(stage['layers'])}{besides}{mark}"
    found = blocks(run, facts.experts)
    for shares, hosts in list(found.items())[:BLOCKS]:
        yield _title(hosts, plan)
        rows = list(_rows(shares, hosts[0], len(hosts) > 1, plan))
        width = max(5, *(len(cell) for _, cells, _ in rows for cell in cells))
        for name, cells, what in rows:
            yield f"    {name:<8}{' '.join(cell.rjust(width) for cell in cells)}  {what}".rstrip()
    if (rest := len(found) - BLOCKS) > 0:
        yield f"  and {rest} more kinds of hosts; --json lists them"


def stages(plan: Plan) -> list[dict[str, Any]]:
    """Return the pipeline ranks in order, each with its GPUs, its ranges of layers and its other parts."""
    each, found = _per_stage(plan.run.layout), []
    for rank, mine in groupby(parameters.stages(plan.run, plan.facts), key=lambda stage: stage.rank):
        mine = list(mine)
        held = [(stage.first, sum(kind != "mtp" for kind in stage.layers)) for stage in mine]
        kinds = [kind for stage in mine for kind in stage.layers]
        found.append(
            {
                "rank": rank,
                "gpus": [rank * each, rank * each + each - 1],
                "layers": [[first, first + count - 1] for first, count in held if count],
                "kinds": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
                "embedding": any(stage.embedding for stage in mine),
                "mtp": "mtp" in kinds,
                "output": any(stage.output for stage in mine),
                "fullest": rank == plan.fullest.rank,
            }
        )
    return found


def blocks(run: Run, experts: int) -> dict[tuple[Share, ...], list[int]]:
    """Return the hosts by the shares of their GPUs. Equal hosts hold the same shares of different stages."""
    layout, each = run.layout, _per_stage(run.layout)
    found: dict[tuple[Share, ...], list[int]] = {}
    for host in range(layout.nodes):
        first = host * layout.gpus_per_node
        held = tuple(
            _share(layout, experts, rank % each, rank // each - first // each)
            for rank in range(first, first + layout.gpus_per_node)
        )
        found.setdefault(held, []).append(host)
    return found


def as_dict(plan: Plan) -> dict[str, Any] | None:
    if not plan.stages:
        return None
    layout = plan.run.layout
    return {
        "stages": stages(plan),
        "of": {"tp": layout.tp, "etp": layout.etp, "experts": plan.facts.experts},
        "hosts": [
            {"hosts": hosts, "gpus": [dict(vars(share)) for share in shares]}
            for shares, hosts in blocks(plan.run, plan.facts.experts).items()
        ],
    }


def _share(layout: Layout, experts: int, place: int, stage: int) -> Share:
    """Return the share of the GPU at this place in its stage."""
    count = experts // layout.ep
    first = place // layout.etp % layout.ep * count
    return Share(stage, place % layout.tp + 1, (first, first + count - 1), place % layout.etp + 1)


def _per_stage(layout: Layout) -> int:
    return layout.world // layout.pp


def _title(hosts: list[int], plan: Plan) -> str:
    per_host, each = plan.run.layout.gpus_per_node, _per_stage(plan.run.layout)
    on = sorted({(host * per_host + place) // each for host in hosts for place in range(per_host)})
    mark = "  * fullest" if plan.fullest.rank in on else ""
    return f"  host{'s' * (len(hosts) > 1)} {_runs(hosts)}: stage{'s' * (len(on) > 1)} {_runs(on)}{mark}"


def _rows(held: tuple[Share, ...], host: int, several: bool, plan: Plan) -> Iterator[tuple[str, list[str], str]]:
    """Yield the rows of a block of hosts: the name, a cell for each GPU of a host, and the meaning of the cells.

    `host` is the first host, and there may be `several`.
    """
    layout, experts = plan.run.layout, plan.facts.experts
    yield "GPU", [str(n) for n in range(len(held))], ""
    if len({share.stage for share in held}) > 1:
        first = host * layout.gpus_per_node // _per_stage(plan.run.layout)
        numbers = [first + share.stage for share in held]
        alike = f"of host {host}, and so on" if several else ""
        yield "stage", [f"{n}{'*' if n == plan.fullest.rank else ''}" for n in numbers], alike
    if layout.tp > 1:
        yield "tp", [f"{share.tp}/{layout.tp}" for share in held], "part of each layer"
    if experts:
        yield "experts", [span(*share.experts) for share in held], f"of {experts}"
    if layout.etp > 1:
        yield "etp", [f"{share.etp}/{layout.etp}" for share in held], "part of each expert"


def _runs(numbers: list[int]) -> str:
    """Format numbers as ranges: 0-3, 8 for [0, 1, 2, 3, 8]. More than a few ranges are cut."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return _spans(spans)


def _spans(spans: list[list[int]], most: int = 6) -> str:
    shown = ", ".join(span(first, last) for first, last in spans[:most])
    return shown + (f", ... ({len(spans)} in all)" if len(spans) > most else "")


def span(first: int, last: int) -> str:
    return "none" if last < first else str(first) if first == last else f"{first}-{last}"
