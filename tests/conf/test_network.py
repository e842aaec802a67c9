"""conf/network.py: which run gets what, and that the variables exist."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from conf.load import load
from conf.network import LEFT_OUT, PRESETS, environment, rank_order, settings
from conf.schema.sections import Gang

ROOT = Path(__file__).parents[2]


def on(
    network: str | None, *overrides: str, conf: str = "glm47-as-documented", gpu: str | None = "h100"
) -> dict[str, str]:
    chosen = [f"gang.network={network}"] if network else []
    return environment(load(conf, [*chosen, *overrides]), gpu)


def test_a_cpu_needs_nothing():
    assert on("ib-h100", gpu=None) == {}


def test_the_configuration_knows_the_presets():
    annotation = Gang.model_fields["network"].annotation
    names = {name for part in get_args(annotation) for name in get_args(part)}
    assert names == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole(name):
    run = load("glm47-as-documented", [f"gang.network={name}"])
    found = settings(run, "h100")
    assert len({setting.name for setting in found}) == len(found)
    assert all(setting.why and setting.value and re.fullmatch(r"[A-Z][A-Z0-9_]+", setting.name) for setting in found)
    assert {setting.name for setting in PRESETS[name].settings} <= {setting.name for setting in found}
    assert not {f"{setting.name}={setting.value}" for setting in found} & set(LEFT_OUT)


def test_one_host_needs_no_network():
    alone = on("ib-h100", "layout.nodes=1", "layout.etp=1")
    assert "NCCL_NET" not in alone and "NCCL_P2P_NET_CHUNKSIZE" not in alone
    assert alone["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_cuda_graphs_leave_their_buffers_to_themselves():
    assert "NCCL_GRAPH_REGISTER" not in on("ib-h100")
    assert on("ib-h100", "train.recompute=none", "train.cuda_graphs=true")["NCCL_GRAPH_REGISTER"] == "0"


def test_buffers_of_tensor_parallel_ranks_want_no_multicast():
    assert "UB_SKIPMC" not in on("ib-h100")
    every = ("adapter.kind=none", "layout.tp=4", "layout.sp=true", "data.packed=false", "train.overlap_tp=true")
    assert on("ib-h100", *every)["UB_SKIPMC"] == "1"


def test_connections_follow_the_gpu_and_the_layout():
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert on(None)[name] == "1"
    assert on(None, gpu="NVIDIA H200")[name] == "1"
    assert on(None, gpu="NVIDIA GB200")[name] == "32"
    assert name not in on(None, "layout.tp=1", "layout.sp=false", "layout.pp=2")


def test_what_else_depends_on_the_run():
    assert on("ib-h100", "layout.pp=2")["NCCL_P2P_NET_CHUNKSIZE"] == "2097152"
    assert "NCCL_P2P_NET_CHUNKSIZE" not in on("ib-h100")
    assert on("nvl72", "moe.dispatcher=flex", gpu="gb200")["NVLINK_DOMAIN_SIZE"] == "72"
    assert on("ib-h100", "moe.dispatcher=flex")["USE_MNNVL"] == "0"
    assert on(None, "gang.stall_seconds=1000")["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "2000"
    assert on(None)["TORCH_FR_DUMP_TEMP_FILE"] == "runs/glm47-as-documented/logs/collectives-"
    assert "NVTE_FWD_LAYERNORM_SM_MARGIN" not in on(None, conf="tiny")
    assert on(None)["NVTE_USE_CUTLASS_GROUPED_GEMM"] == "1"


def test_the_libraries_know_the_variables():
    """Those of NCCL and torch by name in the locked packages; a misspelt one is silently ignored by both."""
    torch, nccl = find_spec("torch"), find_spec("nvidia.nccl")
    assert torch and torch.origin and nccl and nccl.submodule_search_locations
    library = (Path(nccl.submodule_search_locations[0]) / "lib/libnccl.so.2").read_bytes()
    headers = Path(torch.origin).parent / "include/torch/csrc/distributed/c10d"
    words = set(re.findall(r"[A-Z][A-Z0-9_]+", "".join(file.read_text() for file in headers.rglob("*.hpp"))))
    every = {name for preset in PRESETS for name in on(preset, "layout.pp=2")}
    asked = [name for name in every if name.startswith("NCCL_")]
    assert len(asked) > 10 and [name for name in asked if name.encode() + b"\0" not in library] == []
    known = words | {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"}  # in the library alone
    assert [name for name in every if name.startswith("TORCH_") and name not in known] == []


def test_neighbours_are_under_one_switch():
    places = {"node10": "s1.l2", "node9": "s1.l2", "node1": "s10.l1", "node2": "s2.l1", "x": "s2.l1"}
    assert rank_order(places) == ["node9", "node10", "node2", "x", "node1"]
    assert rank_order({"b": "", "a10": "", "a9": ""}) == ["a9", "a10", "b"]


def test_the_command():
    def said(*arguments: str):
        command = [sys.executable, "-m", "conf.network", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    assert [line.split()[0] for line in said().stdout.splitlines()] == list(PRESETS)
    lines = said("roce", "glm47", "--gpu", "b200").stdout.splitlines()
    assert any(re.match(r"NCCL_IB_QPS_PER_CONNECTION=4 +# \w+", line) for line in lines)
    assert any(line.startswith("CUDA_DEVICE_MAX_CONNECTIONS=32") for line in lines)
    wrong = said("roce", "nothing")
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
