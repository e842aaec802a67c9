"""Pre-flight: what is said of made-up hosts, and of real processes over gloo; at last of hosts with addresses of their
own, one of which has a slow link (network namespaces; they want root).
"""

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.load import load
from trainer.hosts.health import of_host
from trainer.hosts.host_verdict import Expected, Misfit, misfits, rounds, slow_hosts, unique

ROOT = Path(__file__).parents[2]
GB = 1e9
GPU = {
    "name": "NVIDIA H200", "driver": "580.159.04", "clock": 1900, "clock_max": 1980, "slowed": [], "ecc": 0,
    "rows": [0, 0, 0, 0], "links": {"up": 18, "there": 18}, "pcie": [16, 16], "temperature": 40,
}  # fmt: skip


def host(name: str, **changes) -> dict:
    disk = {"folder": "runs/x", "write": 1 * GB, "read": 2 * GB, "free": 1000 * GB}
    facts = {"host": name, "versions": {"torch": "2.11.0", "the configuration": "abc"}, "adapters": {}, "disk": disk}
    return {**facts, "memory_available": 100 * GB, "shm_free": 8 * GB, **changes}


def rank(number: int, of: str, gpu: dict | None = None, **changes) -> dict:
    return {"rank": number, "host": of, "speed": 700e12, "link": 300 * GB, "gpu": gpu or {}, "taken": 0, **changes}


def lines(hosts=(), ranks=(), pairs=None, expected=Expected()) -> list[str]:  # noqa: B008
    hosts = hosts or [host(name) for name in "abc"]
    ranks = ranks or [rank(n, one["host"]) for n, one in enumerate(hosts)]
    return [misfit.line for misfit in misfits(hosts, ranks, pairs or {}, expected)]


def mesh(hosts: str, slow: str = "", rails: int = 1, speed=1 * GB, slow_rail: int | None = None):
    return {
        (a, b): [
            speed / 10 if {a, b} & {*slow} and slow_rail in (None, rail) else speed * (1 + 0.01 * rail)
            for rail in range(rails)
        ]
        for a, b in itertools.combinations(hosts, 2)
    }


def test_healthy_hosts_fit():
    ranks = [rank(n, "abc"[n], GPU) for n in range(3)]
    expected = Expected(network=50 * GB, link=450 * GB)
    assert lines(ranks=ranks, pairs=mesh("abc", speed=45 * GB), expected=expected) == []


@pytest.mark.parametrize("hosts", ["abc", "abcd", "abcdefgh"])
def test_the_slow_one_of_three_or_more_is_named(hosts):
    found = slow_hosts(mesh(hosts, slow="b"), 0.6, None)
    assert [(misfit.host, misfit.leave_out) for misfit in found] == [("b", True)]
    assert found[0].line == "host b: 0.1 GB/s to any other host, 1 are usual"


def test_two_slow_ones_of_five_are_named():
    assert [misfit.host for misfit in slow_hosts(mesh("abcde", slow="bd"), 0.6, None)] == ["b", "d"]


def test_of_two_hosts_none_is_left_out():
    assert slow_hosts(mesh("ab"), 0.6, None) == []
    found = slow_hosts(mesh("ab"), 0.6, 50 * GB)
    assert [(misfit.host, misfit.leave_out) for misfit in found] == [("a", False), ("b", False)]
    assert found[0].line == "host a: 1 GB/s to host b, 50 by the data sheet; one of the two"


def test_a_slow_rail_is_named():
    (found,) = slow_hosts(mesh("abc", slow="c", rails=4, slow_rail=2), 0.6, None)
    assert found.line == "host c: 0.1 GB/s to any other host on rail 2, 1.01 are usual"


def test_a_slow_path_between_fast_hosts_is_no_hosts_fault():
    pairs = mesh("abcd")
    pairs["a", "c"] = [0.1 * GB]
    (found,) = slow_hosts(pairs, 0.6, None)
    assert (found.host, found.leave_out) == ("a", False)
    assert found.line == "host a: 0.1 GB/s to host c, though both are faster with others (1 GB/s)"


def test_all_slow_alike_is_seen_by_the_data_sheet():
    found = slow_hosts(mesh("abc", speed=3 * GB), 0.6, 50 * GB)
    assert [misfit.host for misfit in found] == ["a", "b", "c"]


def test_other_versions_and_configurations_are_named():
    hosts = [host("a"), host("b", versions={"torch": "2.10.0", "the configuration": "abc"}), host("c")]
    assert lines(hosts) == ["host b: torch is 2.10.0, elsewhere 2.11.0"]
    ranks = [rank(n, "abc"[n], GPU | {"driver": "570.1"} if n == 2 else GPU) for n in range(3)]
    assert lines(ranks=ranks) == ["host c: the driver is 570.1, elsewhere 580.159.04"]
    ranks = [rank(n, "abc"[n], GPU if n else None) for n in range(3)]
    assert "host a: the GPU is none, elsewhere NVIDIA H200" in lines(ranks=ranks)
    assert Misfit("b", "x").report(1) == "preflight: node 1, host b: x; to be left out"
    assert Misfit("b", "x", False, 3).report(1) == "preflight: node 1, host b, rank 3: x"


@pytest.mark.parametrize(
    "change, line",
    [
        ({"ecc": 3}, "GPU memory has 3 uncorrected bit errors"),
        ({"rows": [1, 1, 1, 0]}, "a row of GPU memory has still to be replaced"),
        ({"rows": [0, 0, 0, 1]}, "a row of GPU memory could not be replaced"),
        ({"slowed": ["too hot (hardware)"], "temperature": 91}, "the GPU runs slower: too hot (hardware), 91 degrees"),
        ({"clock": 345}, "the GPU runs at 345 of 1980 MHz under load"),
        ({"links": {"up": 17, "there": 18}}, "17 of 18 NVLinks are up"),
        ({"pcie": [8, 16]}, "PCIe has 8 of 16 lanes"),
    ],
)
def test_sick_gpus_are_named(change, line):
    ranks = [rank(n, "abc"[n], GPU | change if n == 1 else GPU) for n in range(3)]
    assert lines(ranks=ranks) == [f"host b, rank 1: {line}"]


def test_slow_and_taken_gpus_are_named():
    ranks = [rank(n, "abc"[n], GPU) for n in range(3)]
    assert lines(ranks=[*ranks[:2], rank(2, "c", GPU, speed=400e12)]) == [
        "host c, rank 2: computes 400 TFLOP/s, 700 are usual"
    ]
    assert lines(ranks=[*ranks[:2], rank(2, "c", GPU, taken=40 * GB)]) == [
        "host c, rank 2: another process has 40.0 GB of the GPU's memory"
    ]
    slow = [rank(n, "abc"[n], GPU, link=20 * GB) for n in range(3)]
    assert lines(ranks=slow, expected=Expected(link=450 * GB)) == [
        f"host {'abc'[n]}, rank {n}: reaches the others of its host with 20 GB/s, 450 by the data sheet"
        for n in range(3)
    ]


def test_disks_memory_and_adapters_are_looked_at():
    disk = host("x")["disk"]
    full = [host("a"), host("b", disk=disk | {"free": 1e9}), host("c")]
    on_gpus = [rank(n, "abc"[n], GPU) for n in range(3)]
    assert lines(full, on_gpus) == ["host b: runs/x: 1.0 GB are free, 2 are needed"]
    assert lines(full) == []  # a tiny model's checkpoints have room
    assert lines([host("a"), host("b", disk={"folder": "runs/x", "error": "Read-only file system"}), host("c")]) == [
        "host b: runs/x: Read-only file system"
    ]
    assert lines([host("a"), host("b", disk=disk | {"write": 50e6}), host("c")]) == [
        "host b: runs/x: writes 50 MB/s, the others 1000"
    ]
    assert lines([host("a"), host("b"), host("c", memory_available=20 * GB)]) == [
        "host c: 20 GB of memory are free, elsewhere 100"
    ]
    assert "give the container more" in lines([host("a"), host("b", shm_free=64e6), host("c")])[0]
    eight = {f"mlx5_{n}": "4: ACTIVE" for n in range(8)}
    hosts = [host("a", adapters=eight), host("b", adapters=eight | {"mlx5_3": "1: DOWN"}), host("c", adapters=eight)]
    assert lines(hosts) == ["host b: 7 of 8 RDMA adapters are active"]
    assert len(lines(expected=Expected(adapters=8))) == 3


@given(st.integers(1, 40), st.integers(1, 15))
def test_rounds_let_each_pair_meet_once_and_nobody_twice_at_a_time(hosts, most):
    found = rounds(hosts, most)
    for pairs in found:
        met = [one for pair in pairs for one in pair]
        assert len(met) == len(set(met)) >= hosts - hosts % 2
    every = [pair for pairs in found for pair in pairs]
    assert len(every) == len(set(every)) and len(found) <= max(most, 1)
    if most >= hosts:
        assert len(every) == hosts * (hosts - 1) // 2


def test_hosts_of_one_name_are_told_apart():
    assert unique(["a", "b", "a"]) == ["a/0", "b", "a/2"]


def test_facts_of_this_host(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUP_RANK", "3")
    run = load("tiny", [f"paths.output={tmp_path}/output"])
    facts = of_host(run, 8 << 20)
    assert (facts["host"], facts["node"]) == (socket.gethostname(), 3)
    assert facts["disk"]["write"] > 0 and facts["disk"]["read"] > 0 and facts["disk"]["free"] > 0
    assert facts["versions"]["torch"].startswith("2.") and re.fullmatch(
        r"[0-9a-f]{12}", facts["versions"]["the trainer's code"]
    )
    assert list((tmp_path / "output").iterdir()) == []
    other = of_host(load("tiny", [f"paths.output={tmp_path}/output", "train.steps=7"]), 1)
    assert other["versions"]["the configuration"] != facts["versions"]["the configuration"]
    (tmp_path / "file").write_text("")
    assert "error" in of_host(load("tiny", [f"paths.output={tmp_path}/file/output"]), 1)["disk"]


def start(node: int, nodes: int, port: int, folder: Path, *more: str, address: str = "127.0.0.1", under=()):
    """Start the only rank of a host, as torchrun does."""
    command = [*under, sys.executable, "-m", "trainer.preflight", "conf/tiny.yaml", f"layout.nodes={nodes}"]
    command += ["train.global_batch=12", "train.micro_batch=1"]
    command += [f"paths.logs={folder}/logs", f"paths.output={folder}/output", *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(nodes)}
    environment |= {"RANK": str(node), "GROUP_RANK": str(node), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if under:
        environment["GLOO_SOCKET_IFNAME"] = "eth0"
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_a_host_with_another_configuration_is_named_over_gloo(tmp_path):
    port = free_port()
    hosts = [start(node, 3, port, tmp_path, *(["train.seed=7"] if node == 1 else [])) for node in range(3)]
    outputs = [one.communicate(timeout=120) for one in hosts]
    assert [one.returncode for one in hosts] == [2, 2, 2], outputs
    verdict = json.loads((tmp_path / "logs/preflight.json").read_text())
    name = f"{socket.gethostname()}/1"
    assert name in verdict["leave_out"] and 1 in verdict["nodes"] and not verdict["ok"]
    (line,) = [line for line in verdict["lines"] if "the configuration" in line]  # not what the disk has to do besides
    assert re.fullmatch(
        f"preflight: node 1, host {name}: the configuration is [0-9a-f]+, elsewhere [0-9a-f]+; to be left out", line
    )
    assert len(verdict["pairs"]) == 3 and all(pair["rails"][0] > 0 for pair in verdict["pairs"])
    assert outputs[0][0].startswith("preflight: 3 hosts, 3 ranks") and verdict["seconds"] < 60


@pytest.fixture
def hosts():
    """Three namespaces on a bridge; the third has 400 Mb/s."""
    tag = f"p{os.getpid() % 10000}"
    names = [f"{tag}n{n}" for n in range(3)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("wants root, ip and tc to make network namespaces")
    try:
        ip("link", "add", f"{tag}b", "type", "bridge")
        ip("link", "set", f"{tag}b", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no bridge can be made here: {error.stderr.decode().strip()}")
    try:
        for n, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"{tag}v{n}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{tag}v{n}", "master", f"{tag}b", "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.77.{os.getpid() % 250}.{n + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        limit = [
            "tc",
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            "400mbit",
            "burst",
            "256kb",
            "latency",
            "50ms",
        ]
        ip("netns", "exec", names[2], *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{tag}b"], capture_output=True)


@pytest.mark.slow
def test_a_host_with_a_slow_link_is_named(hosts, tmp_path):
    address = f"10.77.{os.getpid() % 250}.1"
    running = [
        start(node, 3, 29500, tmp_path, address=address, under=("ip", "netns", "exec", name))
        for node, name in enumerate(hosts)
    ]
    outputs = [one.communicate(timeout=180) for one in running]
    verdict = json.loads((tmp_path / "logs/preflight.json").read_text())
    lines = [line for line in verdict["lines"] if " to any other host" in line]  # not what the disk has to do besides
    assert 2 in verdict["nodes"] and len(lines) == 1, (verdict["lines"], outputs)
    assert verdict["seconds"] < 60
