"""Losses that are computed for some tokens at a time, and their gradients, are those of all tokens at once."""

from types import SimpleNamespace

import pytest
import torch

from conf.rules import chunked_loss
from trainer.patches.gradients import chunked_losses

TOKENS, ROWS, HIDDEN, WORDS = 11, 2, 8, 16


class Output(torch.nn.Module):
    sequence_parallel = False

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WORDS, HIDDEN))

    def forward(self, hidden, weight=None):
        return torch.nn.functional.linear(hidden, self.weight if weight is None else weight), None


def losses_of(labels, logits):
    of_token = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
    return of_token.view(logits.shape[:2]).t()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_losses_and_gradients(tied, trained, monkeypatch):
    torch.manual_seed(0)
    layer = Output()
    weight = torch.randn(WORDS, HIDDEN, requires_grad=trained) if tied else None
    layer.weight.requires_grad_(trained and not tied)
    learned = layer.weight if weight is None else weight
    labels, by = torch.randint(WORDS, (ROWS, TOKENS)), torch.rand(ROWS, TOKENS)
    calls = []
    layer.register_forward_hook(lambda module, inputs, outputs: calls.append(len(inputs[0])))
    found = []
    for most in (chunked_loss.LOGITS, 4 * ROWS * WORDS):
        monkeypatch.setattr(chunked_loss, "LOGITS", most)
        hidden = torch.randn(TOKENS, ROWS, HIDDEN, generator=torch.Generator().manual_seed(1), requires_grad=True)
        losses = chunked_losses.of(hidden, labels, layer, weight, losses_of)
        losses.backward(by)
        found.append((losses.detach(), hidden.grad, learned.grad))
        learned.grad = None
    assert calls == ([TOKENS, TOKENS] if trained else [TOKENS, 4, 4, 3])
    torch.testing.assert_close(found[0], found[1])


def test_a_validation_computes_no_gradient(monkeypatch):
    monkeypatch.setattr(chunked_loss, "LOGITS", 1)
    layer = Output().requires_grad_(False)
    hidden, labels = torch.randn(TOKENS, ROWS, HIDDEN, requires_grad=True), torch.zeros(ROWS, TOKENS, dtype=torch.long)
    monkeypatch.setattr(torch.autograd, "grad", None)
    with torch.no_grad():
        assert not chunked_losses.of(hidden, labels, layer, None, losses_of).requires_grad


def test_other_outputs_are_left(monkeypatch):
    """A caller's own output_processor, and logits without labels, are as core has them."""
    seen = []
    chunk = SimpleNamespace()
    postprocess = chunked_losses._with_losses(lambda self, **given: seen.append(given.get("output_processor")))
    postprocess(chunk, labels=None)
    postprocess(chunk, labels=1, output_processor="own")
    postprocess(chunk, labels=1)
    assert seen == [None, "own", chunked_losses._processor]


@pytest.mark.parametrize(
    "model, keys",
    [("llama", "data.packed=true"), ("llama", "layout.gpus_per_node=2 layout.pp=2"), ("qwen3-5-moe", "")],
)
def test_trainings_agree(model, keys, base, configure, ranks, tmp_path):
    base(model)
    rows = []
    for command in ("train", "train_in_chunks"):
        done = ranks(command, configure(model, f"paths.output={tmp_path / command}", *keys.split()))
        assert not done.code, done.output[-3000:]
        rows.append([line for line in done.metrics if line["kind"] != "start"])
    assert len(rows[0]) > 2
    for one, other in zip(*rows, strict=True):
        for name in {"lm_loss", "mtp_loss", "grad_norm"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-5), name


@pytest.mark.parametrize(
    "keys, chunked",
    [
        ("", True),
        ("adapter.kind=none", False),
        ("train.z_loss=1e-4", False),
        ("layout.tp=2 layout.gpus_per_node=2", False),
    ],
)
def test_it_is_for_frozen_outputs(keys, chunked, configure):
    assert chunked_loss.is_chunked(configure("llama", *keys.split())) == chunked
