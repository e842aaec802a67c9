"""trainer/checks/attention.py: a host whose cuDNN is too old for packed rows with sinks is told so in one line."""

from types import SimpleNamespace

import pytest

from conf.load import load
from contract.faults import Fault
from trainer.checks import attention

SINKS, PLAIN = SimpleNamespace(softmax_type="learnable"), SimpleNamespace(softmax_type="vanilla")


@pytest.fixture
def host(monkeypatch):
    """host(gpu, cudnn): this process takes its host for such a one."""

    def host(gpu: bool, cudnn: tuple[int, int, int]) -> None:
        monkeypatch.setattr(attention.device, "has_gpu", lambda: gpu)
        monkeypatch.setattr(attention, "cudnn", lambda: cudnn)

    return host


def test_packed_rows_with_sinks_want_a_newer_cudnn_and_say_which(host):
    host(True, (9, 14, 0))
    with pytest.raises(Fault) as error:
        attention.check(load("tiny", ["data.packed=true", "train.micro_batch=1"]), SINKS)
    (line,) = str(error.value).splitlines()
    assert line.startswith("data.packed: true") and "9.18.0" in line and "9.14.0" in line


@pytest.mark.parametrize(
    "gpu, cudnn, packed, provider",
    [
        (True, (9, 18, 0), "true", SINKS),
        (False, (9, 14, 0), "true", SINKS),
        (True, (9, 14, 0), "false", SINKS),
        (True, (9, 14, 0), "true", PLAIN),
    ],
)
def test_all_else_may_train(host, gpu, cudnn, packed, provider):
    host(gpu, cudnn)
    attention.check(load("tiny", [f"data.packed={packed}", "train.micro_batch=1"]), provider)
