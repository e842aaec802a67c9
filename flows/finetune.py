"""Fine-tune a model on your data, evaluate it before and after, and register the better one.

    python -m flows.finetune tiny                                  on this host; no server needed
    python -m flows.finetune glm47 optimizer.lr=2e-4 --dry-run     list the stages, which are cached, and the cost

    prefect deployment run finetune/glm47     on a work pool (prefect.yaml)
    finetune("tiny", learning_rate=2e-3)      from Python, in any folder (examples/finetune.ipynb)

If the plan does not fit, the run ends before it downloads anything (hardware.gate).
A stage whose artifact is in the store ends as Cached. An interrupted stage resumes. flows/pipeline.py has all stages.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false

from functools import partial

from prefect import State

from conf.overrides import Changes, Name, as_overrides
from contract import closed_pipe
from flows.run_command import command
from flows.run_flow import CheckoutFlow, Stage, name_of_run, run_flow


@partial(CheckoutFlow, name="finetune", flow_run_name=name_of_run, persist_result=False)
def finetune(
    conf: Name = "tiny",  # pyright: ignore[reportInvalidTypeForm]: a choice that depends on the files in conf/
    model: str | None = None,
    data: str | None = None,
    learning_rate: float | None = None,
    epochs: float | None = None,
    rank: int | None = None,
    changes: Changes | str = {},  # noqa: B006  # pyright: ignore[reportInvalidTypeForm, reportArgumentType]
    from_stage: Stage | None = None,  # pyright: ignore[reportInvalidTypeForm]
    until_stage: Stage | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> State:
    """Plan, download, convert, prepare, train, export, evaluate and promote. Existing artifacts are not made again.

    Called from Python it returns a tasks.stages.run_report.Result, and raises an error if the run fails.

    Args:
        conf: The configuration that the run starts from.
        model: Hub id, folder or s3:// URI of the model that is trained (model.source).
        data: File, folder, Hub id or s3:// URI of the rows to train on (data.source).
        learning_rate: Highest learning rate, reached after warmup (optimizer.lr).
        epochs: Passes over the data, such as 3 or 0.5 (train.epochs).
        rank: Inner width of the adapter (adapter.rank).
        changes: Other keys that differ from the configuration, one KEY=VALUE a line, or by section.
        from_stage: Make this stage and all later ones again.
        until_stage: End after this stage.
    """
    short = {"model": model, "data": data, "learning_rate": learning_rate, "epochs": epochs, "rank": rank}
    return run_flow(conf, as_overrides(changes, **short), from_stage, until_stage)


if __name__ == "__main__":
    closed_pipe.run(lambda: command(finetune))
