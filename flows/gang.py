"""Print the job that a run over several hosts would submit to a cluster, without submitting it.

    python -m flows.gang glm47 --engine slurm                    the batch script
    python -m flows.gang glm47 --engine kubernetes kubernetes.image=registry/finetune kubernetes.claim=runs
    python -m flows.gang my.yaml                                 with the file's gang.engine
    python -m flows.gang my.yaml --stage reinforce               hosts of training and hosts of vLLM, in one gang
    python -m flows.gang glm47 --engine skypilot                 rents hosts and runs the flow; or dstack

FINETUNE_STORE and FINETUNE_RUNS are the same as for the flow. The gang's name is a placeholder: a flow derives it from
the stage's fingerprint. To ask the cluster whether it would take the job, give the output to sbatch --test-only or
kubectl create --dry-run=server. If you submit it, its members end at once, because no flow controls them.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from conf.load import OWN, load
from conf.planner.hardware import of
from conf.planner.verdict import facts_of, settle, teacher_of
from conf.rules.reinforcement import is_asked
from conf.schema.named import LAUNCHERS, SUBMITTING, WORKERS
from conf.schema.run import Run
from contract import closed_pipe
from contract.faults import Fault
from flows import arguments
from tasks.gang import launchers
from tasks.gang.board import Board
from tasks.gang.engines import Demand, engine_of
from tasks.gang.job import job_of
from tasks.run.places import open_run_store, runs_folder

FINGERPRINT = "0123456789abcdef"


@arguments.reports_faults
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments.gang().parse_intermixed_args(argv)
    gang = f"{options.stage}-{FINGERPRINT}"
    launcher = options.engine if options.engine in LAUNCHERS else None
    engine = [f"gang.engine={WORKERS if launcher else options.engine}"] if options.engine else []
    run = load(options.conf, [*options.overrides, *engine])
    if run.layout.auto:
        run = settle(run, facts_of(run), of(run), teacher_of(run))
    if launcher:
        print(_task_file(run, launcher, options.conf, options.overrides), end="")
        return 0
    submission = getattr(engine_of(run), "submission", None)
    if submission is None:
        raise Fault(f"gang.engine: {run.gang.engine} submits no job; --engine takes {' or '.join(SUBMITTING)}")
    if options.stage == "reinforce" and not is_asked(run):
        raise Fault("--stage: reinforce, but reinforce.steps is 0, so the run has no such stage")
    logs = str(runs_folder() / "work" / gang / "logs")  # as in a flow
    job = job_of(options.stage, run.changed(paths={"logs": logs}))
    assert job, "an engine that submits something starts all members"
    print(submission(Demand.of(job.run), Board(open_run_store(), gang, 1)), end="")
    return 0


def _task_file(run: Run, launcher: str, conf: str, overrides: Sequence[str]) -> str:
    if not os.environ.get("FINETUNE_STORE", "").startswith("s3://"):
        raise Fault(f"FINETUNE_STORE: hosts of {launcher} share no disk; export FINETUNE_STORE=s3://BUCKET/PREFIX")
    own = next((path for path in (Path(conf), OWN / f"{conf}.yaml") if path.is_file()), None)
    name, content = (own.stem, own.read_text()) if own else (conf, "")
    return launchers.text(run, launcher, name, overrides, content, {**os.environ})


if __name__ == "__main__":
    closed_pipe.run(main)
