"""Scaled-down copy of a run: real steps of the same kind of layout on a tiny model of the same family, on this CPU.

train() takes the steps in up to RANKS gloo processes, and returns the scaled-down run and the losses. Degrees are
lowered to what 4 tiny layers and 8 experts can be cut into, and data-parallel copies are dropped if there are too many
processes. These properties stay: which dimensions are cut, sp, vpp, packing, the adapter, recompute, the distributed
optimizer.

Not covered: families without a tiny model (trainer/tiny.py), uneven stages other than the first or last.
"""

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf import families
from conf.model_facts import facts_from_hf
from conf.rules import objectives, schedule
from conf.rules.layout import problems
from conf.schema.data import Data
from conf.schema.run import Layout, Run
from contract.faults import Fault
from trainer.data import prepared
from trainer.rehearsal import forked_ranks, tiny_models

RANKS = 8
LIMITS = {"tp": 2, "pp": 2, "cp": 2, "ep": 4, "etp": 2}


def train(
    run: Run, config: dict[str, Any], steps: int, convert: Callable[[Run], None], take_steps: Callable[[Run], None]
) -> tuple[Run, list[float]]:
    """Train the scaled-down run. Return it and the losses.

    `convert` and `take_steps` are the main functions of trainer/convert.py and trainer/train.py. Raise a Fault if the
    run cannot be scaled down, and a RuntimeError if its ranks fail.
    """
    kinds, family = families.tiny(), families.of(config)
    if not family.tiny:
        raise Fault(f"--steps: there is no tiny model of {config['architectures'][0]}; there are {', '.join(kinds)}")
    kind = family.model_type.replace("_", "-")
    if run.model.mtp and config.get(family.key("num_nextn_predict_layers")) and f"{kind}-mtp" in kinds:
        kind += "-mtp"
    with tempfile.TemporaryDirectory(prefix="twin-") as name:
        folder = Path(name)
        twin = make(run, kind, steps, folder)
        if faults := problems(twin, facts_from_hf(families.tiny()[kind])):
            raise Fault(f"--steps: no twin of this layout on {RANKS} processes: {faults[0]}")
        tiny_models.make_model(kind, folder / "model", dtype="float32")
        tiny_models.make_data(folder / "given", rows=64)
        alone = twin.model_copy(update={"layout": Layout()})
        rows = alone.changed(paths={"data": str(folder / "given"), "output": str(folder / "prepared")})
        for command, command_run in ((convert, alone), (prepared.make, rows), (take_steps, twin)):
            log = folder / f"{command.__module__}.log"
            if forked_ranks.call(command, command_run, log):
                raise RuntimeError("".join(log.read_text().splitlines(keepends=True)[-5:]))
        lines = map(json.loads, (folder / "output" / "metrics.jsonl").read_text().splitlines())
        return twin, [line["lm_loss"] for line in lines if line["kind"] == "train"]


def make(run: Run, kind: str, steps: int, folder: Path) -> Run:
    run = schedule.of_steps(objectives.as_sft(run), steps)
    layout = scale(run.layout, facts_from_hf(families.tiny()[kind]).layers)
    copies = layout.world // (layout.tp * layout.cp * layout.pp)
    train = {"global_batch": copies * layout.pp, "micro_batch": 1, "recompute_layers": 1}
    train |= {"precision": "fp32", "fp8": None, "fp8_weights": False}
    optimizer = {"lr": 5e-3, "states": "fp32", "gradients": "fp32", "offload": 0.0}
    paths = {key: str(folder / key) for key in ("model", "base", "output", "logs")}
    paths["data"] = str(folder / "prepared" / "data")
    data = Data(seq_length=64, template="{input} {output}", packed=run.data.packed, seed=run.data.seed)
    run = run.model_copy(update={"layout": layout, "data": data})
    return run.changed(train=train, adapter={"rank": 8, "alpha": 16}, optimizer=optimizer, paths=paths)


def scale(layout: Layout, layers: int) -> Layout:
    """Return the largest layout of the same kind on RANKS processes. Degrees are lowered to 2, expert ones first."""
    degrees = {key: min(getattr(layout, key), limit) for key, limit in LIMITS.items()}

    def cut() -> int:
        dense = degrees["tp"] * degrees["cp"] * degrees["pp"]
        return math.lcm(dense, degrees["etp"] * degrees["ep"] * degrees["pp"])

    for key, least in (("ep", 2), ("cp", 1), ("etp", 1), ("tp", 1)):
        if cut() > RANKS:
            degrees[key] = min(degrees[key], least)
    uneven = layout.first_stage_layers or layout.last_stage_layers
    vpp = 2 if layout.vpp and degrees["pp"] > 1 else None
    copies = 2 if layout.world > cut() and 2 * cut() <= RANKS else 1
    return Layout(
        gpus_per_node=cut() * copies,
        **degrees,
        vpp=vpp,
        sp=layout.sp and degrees["tp"] > 1,
        # one uneven stage, if the layout has one
        last_stage_layers=layers - 3 if uneven and degrees["pp"] == 2 and not vpp else None,
    )
