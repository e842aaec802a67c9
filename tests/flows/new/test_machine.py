"""flows/new/machine.py: GPUs by name, and those of this host."""

import pytest

from contract.faults import ConfigError, Fault
from flows.new import machine
from flows.new.machine import parse

HERE = parse("4xh200", why="what this host has")


@pytest.mark.parametrize(
    "text, kind, nodes, per_node",
    [
        ("8xh100", "h100", 1, 8),
        ("h100", "h100", 1, 1),
        ("1 x H200", "h200", 1, 1),
        ("16xh100", "h100", 2, 8),
        ("2x8xh200", "h200", 2, 8),
        ("2x4xh200", "h200", 2, 4),
        ("8xgb200", "gb200", 2, 4),
        ("2", "h200", 1, 2),
        ("cpu", "cpu", 1, 1),
        ("2xcpu", "cpu", 1, 2),
    ],
)
def test_gpus_by_name(text, kind, nodes, per_node):
    found = parse(text, HERE)
    assert (found.kind, found.nodes, found.per_node) == (kind, nodes, per_node)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("8", "the kind is missing"),
        ("8xfoo", "'foo' is not one of a100"),
        ("0xh100", "0 is not a number of GPUs"),
        ("12xh100", "not a whole number of hosts of 8 h100"),
        ("h100x8", "'h100x8' is not one of"),
        ("", "not a number of GPUs and their kind"),
        ("2xno.yaml", "no.yaml: no such file"),
    ],
)
def test_what_names_no_gpus(text, complaint):
    with pytest.raises((Fault, ConfigError), match=complaint):
        parse(text)


def test_own_gpus_from_a_file(tmp_path):
    file = tmp_path / "l40s.yaml"
    file.write_text("{name: l40s, memory: 44.4, bf16: 362, hbm: 864, link: 32, network: 25, per_host: 4}")
    found = parse(f"4x{file}")
    assert (found.kind, found.gpu.name, found.per_node) == (str(file), "l40s", 4)


@pytest.mark.parametrize(
    "row, kind",
    [
        ("NVIDIA H100 80GB HBM3, 81559", "h100"),
        ("NVIDIA H200, 143771", "h200"),
        ("NVIDIA A100-SXM4-80GB, 81920", "a100"),
        ("NVIDIA B200, 183359", "b200"),
        ("NVIDIA GeForce RTX 4090, 24564", "rtx4090"),
        ("NVIDIA L4, 23034", "l4"),
        ("NVIDIA L40S, 46068", "l40s"),
    ],
)
def test_gpus_of_a_host_by_what_nvidia_smi_says(row, kind):
    assert machine._described(8, row).kind == kind


@pytest.mark.parametrize("row", ["NVIDIA A100-SXM4-40GB, 40960", "NVIDIA GeForce RTX 3090, 24576", ""])
def test_gpus_without_a_data_sheet_are_refused_with_what_to_write(row):
    with pytest.raises(Fault, match=r"--gpus 2xmy-gpu.yaml takes a file"):
        machine._described(2, row)


def test_a_host_without_gpus(monkeypatch):
    monkeypatch.setattr(machine.nvidia_smi, "visible", lambda: ())
    assert machine.of_this_host() is None
