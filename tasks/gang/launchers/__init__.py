"""Task files of SkyPilot and dstack, which rent hosts of a cloud: a gang of n hosts with one command.

    text(run, "skypilot", conf, ...)        a file for `sky launch`; or "dstack", for `dstack apply`

Both start the same script on each host of a task (hosts.sh.j2). The first host starts Prefect's server and the flow,
and each host a worker, so the gang has the engine prefect. Hosts share no disk: the store must be in S3.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conf.planner.hardware import of
from conf.schema.clusters import AWS
from conf.schema.run import Run

FOLDER = Path(__file__).parent
PORT = 4200
# Variables that the user's environment must have; those of AWS may be missing on hosts with a role.
SECRETS = (*(name for name in AWS if name != "AWS_PROFILE"), "HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_URI")
MEMORY = {"a100": "80GB"}  # of products with several sizes


def text(run: Run, launcher: str, conf: str, changes: Sequence[str], content: str, variables: dict[str, str]) -> str:
    """The file. `content` is the configuration's, if it is the user's; `variables` is the user's environment."""
    gpu = of(run).name
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters["json"] = json.dumps
    script = (
        environment.get_template("hosts.sh.j2")
        .render(
            port=PORT,
            pool=run.gang.pool,
            conf=conf,
            content=content,
            changes=shlex.join([*changes, "gang.engine=prefect"]),
            rank={"skypilot": "$SKYPILOT_NODE_RANK", "dstack": "$DSTACK_NODE_RANK"}[launcher],
            head={"skypilot": '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', "dstack": "$DSTACK_MASTER_NODE_IP"}[launcher],
        )
        .rstrip()
    )
    return environment.get_template(f"{launcher}.yaml.j2").render(
        name=run.name[:40].strip("-"),
        nodes=run.layout.nodes + run.gang.spares,
        gpu=gpu.upper(),
        memory=MEMORY.get(gpu),
        gpus=run.layout.gpus_per_node,
        extra="cpu" if gpu == "cpu" else "gpu",
        store=variables["FINETUNE_STORE"],
        secrets=[name for name in SECRETS if name in variables],
        script=script,
    )
