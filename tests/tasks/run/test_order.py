"""tasks/run/order.py: which stages a run asks for; one without questions is trained and exported, and not promoted."""

from conf.load import load
from tasks.run.artifact import Stage
from tasks.run.order import ORDER, asked
from tasks.stages import promote

WITHOUT = ["download", "prepare", "convert", "train", "export"]


def test_all_stages_up_to_the_last_are_asked_for():
    assert asked(load("tiny"), None) == [*ORDER]
    assert asked(load("tiny"), "evaluate-base") == [*ORDER[:4]]


def test_without_questions_nothing_is_evaluated_and_nothing_promoted():
    run = load("tiny", ["evaluate.tasks=[]"])
    assert asked(run, None) == WITHOUT and asked(run, "train") == WITHOUT[:4]
    some = Stage("export", 1, {}, {})
    assert promote.stage(run, some, some, some).name == "promote"  # no fault that its metric is of no task
