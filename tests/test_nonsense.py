"""Nonsense in a configuration or on a command line is refused: one line with the key, and nothing starts."""

import json
import shlex
import sys

import pytest

from benchmarks import presets
from flows import plan as flows_plan
from flows import pretrain
from flows.run_command import command
from trainer.data.read import lines

DENSE = "tiny model.source=tiny://qwen3"
RL = "tiny-rl"
# Words of a command line after flows.plan, and the key that the line of refusal begins with.
NONSENSE = [
    ("tiny optimizer.weight_decay=653290", "optimizer.weight_decay"),
    ("tiny optimizer.weight_decay=-1", "optimizer.weight_decay"),
    ("tiny optimizer.eps=557904", "optimizer.eps"),
    ("tiny optimizer.eps=1e-320", "optimizer.eps"),
    ("tiny optimizer.clip_grad=1e-320", "optimizer.clip_grad"),
    ("tiny optimizer.clip_grad=1e308", "optimizer.clip_grad"),
    ("tiny optimizer.lr=3", "optimizer.lr"),
    ("tiny optimizer.min_lr=0.9", "optimizer.min_lr"),
    ("tiny optimizer.beta1=0.9999999999999999", "optimizer.beta1"),
    ("tiny optimizer.beta2=1", "optimizer.beta2"),
    ("tiny optimizer.warmup_steps=1000000", "optimizer.warmup_steps"),
    ("tiny moe.z_loss_coeff=1e308", "moe.z_loss_coeff"),
    ("tiny moe.aux_loss_coeff=1e308", "moe.aux_loss_coeff"),
    (f"{DENSE} moe.aux_loss_coeff=0.1", "moe.aux_loss_coeff"),
    (f"{DENSE} moe.z_loss_coeff=0.1", "moe.z_loss_coeff"),
    (f"{DENSE} moe.balance=aux_loss", "moe.balance"),
    (f"{DENSE} moe.force_balance=true", "moe.force_balance"),
    (f"{DENSE} moe.freeze_router=true", "moe.freeze_router"),
    (f"{DENSE} layout.gpus_per_node=2 layout.ep=2", "layout.ep"),
    ("tiny model.mtp_loss_scale=1e300", "model.mtp_loss_scale"),
    ("tiny model.dropout=1", "model.dropout"),
    ("tiny model.source=tiny://bert", "model.source"),
    ("tiny model.pack=[experts]", "model.pack"),
    ("tiny model.tokenizer=tiny://qwen3", "model.tokenizer"),
    ("tiny evaluate.parity_bound=52", "evaluate.parity_bound"),
    ("tiny evaluate.nodes=60000", "evaluate.nodes"),
    ("tiny gang.min_nodes=60", "gang.min_nodes"),
    ("tiny gang.start_within=1e300", "gang.start_within"),
    ("tiny gang.start_within=1e-300", "gang.start_within"),
    ("tiny gang.stall_factor=1e300", "gang.stall_factor"),
    ("tiny gang.stall_seconds=1e300", "gang.stall_seconds"),
    ("tiny gang.quiet_seconds=1e-300", "gang.quiet_seconds"),
    ("tiny promote.model='\"{input}\"'", "promote.model"),
    ("tiny promote.model=a/b", "promote.model"),
    ("tiny promote.metric=held_out/", "promote.metric"),
    ("tiny promote.margin=2", "promote.margin"),
    ("tiny paths.output='\"runs/{nam}/x\"'", "paths.output"),
    ("tiny adapter.alpha=2147483647", "adapter.alpha"),
    ("tiny adapter.rank=2147483647", "adapter.alpha"),
    ("tiny adapter.rank=4096", "adapter.rank"),
    ("tiny adapter.b_lr_ratio=1e-300", "adapter.b_lr_ratio"),
    ("tiny adapter.dropout=1", "adapter.dropout"),
    ("tiny adapter.targets=[]", "adapter.targets"),
    ("tiny-dpo train.dpo_beta=1e-300", "train.dpo_beta"),
    ("tiny train.dpo_beta=5", "train.dpo_beta"),
    ("tiny-distill train.distill_temperature=1e-300", "train.distill_temperature"),
    ("tiny train.epochs=1e-320", "train.epochs"),
    ("tiny train.steps=0", "train.steps"),
    ("tiny train.precision=fp16 train.loss_scale=1e300", "train.loss_scale"),
    ("tiny train.ema_decay=1e-300", "train.ema_decay"),
    ("tiny train.micro_batch=7", "train.global_batch"),
    ("tiny train.stop_after=2000000", "train.stop_after"),
    ("tiny data.processes=2147483647", "data.processes"),
    ("tiny data.seq_length=1", "data.seq_length"),
    ("tiny data.seq_length=2147483647", "data.seq_length"),
    ("tiny data.validation=0.6 data.test=0.6", "data.test"),
    ("tiny data.template='{output} {input}'", "data.template"),
    ("tiny checkpoint.save_every=1e-300", "checkpoint.save_every"),
    ("tiny export.checkpoint=2000000", "export.checkpoint"),
    ("tiny export.checkpoint=best", "export.checkpoint"),
    ("tiny log.peak_tflops=1e300", "log.peak_tflops"),
    ("tiny hardware.price=1e300", "hardware.price"),
    ("tiny hardware.gpu=h1000", "hardware.gpu"),
    ("tiny track.experiment='\" \"'", "track.experiment"),
    ("tiny layout.vpp=2", "layout.vpp"),
    ("tiny layout.first_stage_layers=100", "layout.first_stage_layers"),
    (f"{RL} reinforce.temperature=1e-300", "reinforce.temperature"),
    (f"{RL} reinforce.lr=1e-320", "reinforce.lr"),
    (f"{RL} reinforce.clip_low=5", "reinforce.clip_low"),
    (f"{RL} reinforce.clip_high=1e300", "reinforce.clip_high"),
    (f"{RL} reinforce.kl=1e300", "reinforce.kl"),
    (f"{RL} reinforce.correction_high=1e300", "reinforce.correction_high"),
    (f"{RL} reinforce.probe_bound=52", "reinforce.probe_bound"),
    (f"{RL} reinforce.reward_seconds=1e-300", "reinforce.reward_seconds"),
    (f"{RL} reinforce.reward_memory_gb=1e-300", "reinforce.reward_memory_gb"),
    (f"{RL} reinforce.max_tokens=4096", "reinforce.max_tokens"),
    ("tiny slurm.gpus=some", "slurm.gpus"),
    ("tiny kubernetes.shm=0Gi", "kubernetes.shm"),
    ("tiny kubernetes.memory=1..2Gi", "kubernetes.memory"),
    ("tiny kubernetes.resources=[rdma/ib=0]", "kubernetes.resources"),
    ("tiny no.such_key=1", "no.such_key"),
    ("tiny optimizer.lr=1e-4 optimizer.lr=1e-3", "optimizer.lr"),
    ("tiny --gpus 0", "--gpus"),
    ("tiny --top 0", "--top"),
    ("tiny --price nan", "--price"),
    ("nowhere", "no such configuration"),
]


@pytest.mark.parametrize("line, key", NONSENSE)
def test_the_plan_refuses_nonsense_in_a_line_that_names_the_key(capsys, line, key):
    assert flows_plan.main(shlex.split(line)) != 0
    output = capsys.readouterr()
    refusals = [text for text in (output.out + output.err).splitlines() if key in text]
    assert any(text.startswith(("error: ", "illegal ", "refused", "also refused: ")) for text in refusals), output
    assert len(output.err.splitlines()) <= 1 and "Traceback" not in output.err


SENSE = [
    "tiny optimizer.weight_decay=3.2 optimizer.eps=1e-15 optimizer.clip_grad=1e-3",
    "tiny optimizer.eps=0.1 optimizer.clip_grad=0 optimizer.beta2=0.9999",
    "tiny moe.aux_loss_coeff=0.5 moe.z_loss_coeff=0.1 moe.balance=seq_aux_loss",
    f"{DENSE} moe.aux_loss_coeff=0 moe.balance=none moe.force_balance=false",
    "tiny adapter.alpha=1 adapter.rank=64",
    "tiny adapter.alpha=512 adapter.rank=8",
    "tiny evaluate.parity_bound=0.5 gang.start_within=86400 hardware.price=98.32",
    "tiny layout.nodes=2 gang.min_nodes=1 train.micro_batch=8",
    "tiny promote.model='\"{name}-tuned\"' promote.metric=held_out/perplexity promote.margin=5",
    "tiny kubernetes.memory=1.5Ti kubernetes.resources=[rdma/ib=8] kubernetes.shm=100Gi",
]


@pytest.mark.parametrize("line", SENSE)
def test_unusual_and_sensible_values_pass(capsys, line):
    assert flows_plan.main(shlex.split(line)) == 0, capsys.readouterr()


@pytest.mark.parametrize("text", ["", "\n\n", "input,output\n"])
def test_a_dry_run_refuses_data_without_a_row(tmp_path, monkeypatch, capsys, text):
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "rows.csv").write_text(text)
    monkeypatch.setattr(sys, "argv", ["finetune", "tiny", f"data.source={tmp_path}/rows.csv", "--dry-run"])
    assert command(_Unstarted("finetune")) == 2
    assert capsys.readouterr().err == f"error: data.source: {tmp_path}/rows.csv: no row in {tmp_path}/rows.csv\n"


@pytest.mark.parametrize("name", ["finetune", "pretrain"])
def test_a_flow_without_a_configuration_starts_nothing(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name])
    assert command(_Unstarted(name)) == 2
    assert capsys.readouterr().err.startswith("error: NAME: missing; ")
    assert pretrain.pretrain.name == "pretrain"


class _Unstarted:
    """A flow that must not start."""

    def __init__(self, name: str) -> None:
        self.name = name

    def with_options(self, **_: object):
        raise AssertionError("the flow has started")


@pytest.mark.parametrize("make", [lambda page: None, lambda page: page.mkdir(), lambda page: page.write_bytes(b"\xff")])
def test_the_table_of_presets_is_not_written_into_what_is_not_a_page(tmp_path, monkeypatch, make):
    make(page := tmp_path / "page.md")
    monkeypatch.setattr(presets, "presets", lambda: pytest.fail("planned before the page was read"))
    with pytest.raises(SystemExit, match=r"^error: .*page\.md: .*; name a page with <!-- presets: begin -->"):
        presets.main([str(page)])


def test_a_search_that_finds_layouts_lists_no_illegal_ones(capsys):
    assert flows_plan.main(["llama31-8b-1xh100", "--gpus", "3"]) == 0
    output = capsys.readouterr().out
    assert "illegal:" not in output and "others are illegal or do not fit; --json names the reasons" in output
    assert flows_plan.main(["tiny", "--gpus", "3"]) == 1
    assert "illegal: layout.ep: 3 does not divide the 8 experts" in capsys.readouterr().out


TWICE = [
    ('{"input": "a", "input": "b", "output": "c"}', "input"),
    ('{"messages": [{"role": "user", "content": "a", "role": "system"}]}', "role"),
    ('{"a": 1, "\\u0061": 2}', "a"),
    ('{"a": "\\\\", "b": "\\"", "b": 1}', "b"),
    ('{"n": 123456789012345678901234567890, "n": 1}', "n"),
]


@pytest.mark.parametrize("text, key", TWICE)
def test_a_row_with_a_key_twice_is_bad(text, key):
    found = lines.json_object(text.encode())
    assert (found.reason, found.field) == ("a key occurs twice", key)  # pyright: ignore


@pytest.mark.parametrize(
    "row",
    [
        {"a": 'quotes " and \\ and \\" and \\\\', "b": ["x", {"c": "\\"}], "": None},
        {"é": "\u2028", "\\": '"', '"': {"\\\\": {}}, "n": 1.5},
    ],
)
def test_a_row_with_quotes_and_backslashes_is_read_as_it_is(row):
    for text in (json.dumps(row), json.dumps(row, ensure_ascii=False)):
        assert lines.json_object(text.encode()) == row
