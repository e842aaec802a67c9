"""Fine-tune: a released model and a data set in, a better model out, registered and explained.

python -m flows.finetune tiny                               on this host, without a server
prefect deployment run finetune/glm47                       on a work pool
"""

import sys

from prefect import flow

from conf.load import load
from tasks.convert import convert
from tasks.download import download
from tasks.evaluate import evaluate
from tasks.export import export
from tasks.pipeline import stages
from tasks.prepare import prepare
from tasks.promote import promote
from tasks.session import Session
from tasks.train import train


@flow(name="finetune")
def finetune(conf: str = "tiny", overrides: list[str] | None = None, first=None, last=None):
    run = load(conf, overrides or [])
    with Session(run, stages(run), "flow", first, last) as session:
        model = download.submit(session)
        data = prepare.submit(session)
        base = convert.submit(session, model)
        before = evaluate.submit(session, "base", model, data)
        trained = train.submit(session, model, base, data)
        tuned = export.submit(session, model, base, trained)
        after = evaluate.submit(session, "tuned", tuned, data, trained)
        promote.submit(session, tuned, before, after).wait()
        for name, o in session.outcomes.items():
            print(name, o.state, round(o.seconds, 1), o.reason, o.artifact.result if o.artifact else "")


if __name__ == "__main__":
    finetune(sys.argv[1], sys.argv[2:])
