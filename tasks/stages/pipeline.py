"""Pipeline of a run: the stages in order, and the inputs of each.

All fingerprints are known before anything is made.
"""

from conf.schema.run import Run
from tasks.run.artifact import Stage
from tasks.run.order import ORDER
from tasks.stages import convert, download, evaluate, export, prepare, promote, train


def stages(run: Run) -> dict[str, Stage]:
    """Stages by name, in ORDER. The Hub or the store is asked which commit or content the sources have now."""
    model = download.stage(run)
    data = prepare.stage(run, model)
    base = convert.stage(run, model)
    before = evaluate.stage(run, model, data)
    trained = train.stage(run, base, data)
    tuned = export.stage(run, model, trained)
    after = evaluate.stage(run, tuned, data, trained)
    promoted = promote.stage(run, tuned, before, after)
    return dict(zip(ORDER, (model, data, base, before, trained, tuned, after, promoted), strict=True))
