"""Secrets in Prefect's blocks: a variable that the environment lacks comes from the Secret block of its name.

    HF_TOKEN is in the block hf-token, AWS_ACCESS_KEY_ID in aws-access-key-id. docs/how-to/prefect.md creates one.

A variable of the environment has precedence. A flow reads all blocks with one request when it starts. The values stay
in its process and in those of its children that need them (tasks/run/launch.py).
"""

import os

from prefect.client.orchestration import get_client

NAMES = (
    "HF_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "VLLM_API_KEY",
)


def use() -> None:
    """Set the variables that are missing and have a block."""
    missing = {name.lower().replace("_", "-"): name for name in NAMES if not os.environ.get(name)}
    with get_client(sync_client=True) as client:
        for block in client.read_block_documents_by_type("secret", limit=200, include_secrets=True):
            if name := missing.get(block.name or ""):
                os.environ[name] = str(block.data["value"])
