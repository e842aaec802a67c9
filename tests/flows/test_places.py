"""A flow whose store or folder of local files cannot be used ends in a line before any stage, without an exception."""

import logging
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.exceptions import FailedRun

from conf.load import load
from flows import run_flow
from tasks.stages import plan


@pytest.mark.parametrize("variable", ["FINETUNE_STORE", "FINETUNE_RUNS"])
@pytest.mark.parametrize("below", ["", "/folder"])
def test_a_file_in_the_place_of_a_folder_ends_the_flow_in_a_line(monkeypatch, tmp_path, variable, below):
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("FINETUNE_STORE", str(tmp_path / "store"))
    (tmp_path / "file").touch()
    planned = plan.settle(load("tiny", []))
    asked = SimpleNamespace(result=lambda: planned)
    monkeypatch.setattr(run_flow, "plan", SimpleNamespace(submit=lambda run, last: asked))
    monkeypatch.setattr(run_flow, "flow_run", SimpleNamespace(id=str(uuid4()), name="toy", tags=[]))
    monkeypatch.setenv(variable, f"{tmp_path}/file{below}")
    state = run_flow.run_flow("tiny", [], None, None)
    assert state.is_failed() and state.message is not None
    assert state.message.endswith(f"{tmp_path}/file{below} must be a writable folder")
    assert "Not a directory" in state.message or "File exists" in state.message
    trace = (FailedRun, FailedRun(state.message), None)
    logged = logging.LogRecord("prefect.flow_runs", logging.ERROR, __file__, 1, "unexpected exception", (), trace)
    assert not logging.getLogger("prefect.flow_runs").filter(logged), "Prefect's engine adds a stack trace"
