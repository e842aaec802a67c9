"""A process that has imported Megatron and rehearses what it is sent: a JSON object a line, and a line of answer.

In: {"run": ..., "config": ...}. Out: {"counts": {rank: {kind: parameters}}} of each pipeline stage's first rank, or
{"refused": Megatron's words}; {"failed": ...}, with the stack, for what is a defect.
"""

import json
import sys
import traceback

from conf.schema.run import Run
from trainer import rehearse
from trainer.rehearsal import meta_model


def answer(run: Run, config: dict) -> dict:
    try:
        return {"counts": {rank: meta_model.count(run, config, rank) for rank in rehearse.ranks(run)}}
    except meta_model.Refused as refusal:
        return {"refused": str(refusal)}
    except Exception:
        return {"failed": traceback.format_exc()}


if __name__ == "__main__":
    out = sys.stdout
    sys.stdout = sys.stderr
    meta_model.prepare()
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(answer(Run.model_validate(asked["run"], strict=False), asked["config"])), file=out, flush=True)
