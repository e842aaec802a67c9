"""Pretrain: a configuration and texts in; a language model out, registered, with its perplexity.

    python -m flows.pretrain tiny-pretrain                         on this host, within two minutes; no server needed
    python -m flows.pretrain llama-125m 'data.source=s3://bucket/tokens_text_document' --dry-run
    prefect deployment run pretrain/llama-125m                     on a work pool (prefect.yaml)

Stages, artifacts and stores are those of flows.finetune; every weight is trained. It begins with weights drawn from
train.seed (model.source={config: ...}), or with a released model's. Data are texts, or Megatron's .bin/.idx.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false

import sys

from prefect import State, flow

from conf.overrides import Changes, Name
from conf.rules import pretraining
from contract import closed_pipe
from flows.pipeline import every_stage
from flows.pipeline.command import command
from flows.pipeline.every_stage import Stage, name_of_run


@flow(name="pretrain", flow_run_name=name_of_run, persist_result=False)
def pretrain(
    conf: Name = "tiny-pretrain",  # pyright: ignore[reportInvalidTypeForm]
    changes: Changes = {},  # noqa: B006  # pyright: ignore[reportInvalidTypeForm, reportArgumentType]
    from_stage: Stage | None = None,  # pyright: ignore[reportInvalidTypeForm]
    until_stage: Stage | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> State:
    """Draw weights, prepare texts, train, validate, export, evaluate and register; what is there is not made again.

    Args:
        conf: The configuration in conf/ that the run starts from.
        changes: Keys that differ from it.
        from_stage: Make this stage and all behind it anew.
        until_stage: End after this stage.
    """
    return every_stage.make(conf, changes, from_stage, until_stage, pretraining.require)


if __name__ == "__main__":
    with closed_pipe.quiet():
        sys.exit(command(pretrain, __doc__, pretraining.require, example="tiny-pretrain"))
