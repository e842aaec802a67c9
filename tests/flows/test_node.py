"""flows/node.py is no command of a person's, and says so to one who tries it."""

import runpy

import pytest


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["--help"], 0, "Nobody starts this flow by hand."),
        ([], 2, "error: flows.node: a worker of Prefect's starts it, once for each host of a run\n"),
    ],
)
def test_a_person_is_told(arguments, code, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["node", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("flows.node", run_name="__main__")
    assert end.value.code == code and said in "".join(capsys.readouterr())
