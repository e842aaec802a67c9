"""Train with an objective and a metric of the folder, name and source in paths.output/request.json."""

import json
import sys
from pathlib import Path

from conf.schema.run import Run
from trainer import train


def main(run: Run) -> None:
    request = json.loads((Path(run.paths.output) / "request.json").read_text())
    sys.path.insert(0, request["folder"])
    from trainer.training import metrics

    exec(compile(request["metrics"], metrics.__file__, "exec"), vars(metrics))
    train.main(run.model_copy(update={"train": run.train.model_copy(update={"objective": request["objective"]})}))
