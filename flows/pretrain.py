"""Pretrain a language model on texts, and register it with its perplexity.

    python -m flows.pretrain tiny-pretrain                         on this host, within two minutes; no server needed
    python -m flows.pretrain llama-125m 'data.source=s3://bucket/tokens_text_document' --dry-run

    prefect deployment run pretrain/llama-125m     on a work pool (prefect.yaml)

Stages, artifacts and store are the same as for flows.finetune; all weights are trained. Training starts from random
weights (model.source={config: ...}), or from a released model. Data are texts, or Megatron's .bin/.idx.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false

from functools import partial

from prefect import State

from conf.overrides import Changes, Name, as_overrides
from conf.rules import pretraining
from contract import closed_pipe
from flows.run_command import command
from flows.run_flow import CheckoutFlow, Stage, name_of_run, run_flow


@partial(CheckoutFlow, name="pretrain", flow_run_name=name_of_run, persist_result=False)
def pretrain(
    conf: Name = "tiny-pretrain",  # pyright: ignore[reportInvalidTypeForm]
    data: str | None = None,
    learning_rate: float | None = None,
    epochs: float | None = None,
    changes: Changes | str = {},  # noqa: B006  # pyright: ignore[reportInvalidTypeForm, reportArgumentType]
    from_stage: Stage | None = None,  # pyright: ignore[reportInvalidTypeForm]
    until_stage: Stage | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> State:
    """Draw weights, prepare texts, train, validate, export, evaluate and register. Existing artifacts are kept.

    Args:
        conf: The configuration that the run starts from.
        data: File, folder, Hub id or s3:// URI of the texts to train on (data.source).
        learning_rate: Highest learning rate, reached after warmup (optimizer.lr).
        epochs: Passes over the data, such as 3 or 0.5 (train.epochs).
        changes: Other keys that differ from the configuration, one KEY=VALUE a line, or by section.
        from_stage: Make this stage and all later ones again.
        until_stage: End after this stage.
    """
    overrides = as_overrides(changes, data=data, learning_rate=learning_rate, epochs=epochs)
    return run_flow(conf, overrides, from_stage, until_stage, pretraining.require)


if __name__ == "__main__":
    closed_pipe.run(lambda: command(pretrain, pretraining.require, example="tiny-pretrain"))
