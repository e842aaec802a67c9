"""Ranks meet where nobody else can: on the loopback address, and through a relay between hosts that share a secret.

Ranks are toys with a real process group over gloo; the last tests are of the relay alone.
"""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conf import network
from tests.support.listening import listening
from trainer.startup import relay

ROOT = Path(__file__).parents[3]
RANK = """
import os, time
from torch import distributed
distributed.init_process_group("gloo")
ranks = [None] * distributed.get_world_size()
distributed.all_gather_object(ranks, (distributed.get_rank(), "GANG_KEY" in os.environ))
print(ranks, flush=True)
time.sleep(1)
distributed.barrier()
"""


@pytest.fixture
def host(tmp_path):
    """host(number, of, relay's address, secret) starts torchrun with two ranks; it ends with the test."""
    (tmp_path / "toy.py").write_text(RANK)
    started: list[subprocess.Popen] = []

    def host(number: int, of: int, address: str, secret: str, **environment: str) -> subprocess.Popen:
        port = address.rpartition(":")[2]
        options = network.meeting(of, number, address.rpartition(":")[0], int(port))
        environment |= network.sockets() | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "GANG_KEY": secret}
        command = [sys.executable, "-m", "trainer.startup.torchrun", *options, "--rdzv-id", "x"]
        command += ["--nproc-per-node", "2", "-m", "toy"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=os.environ | environment | {"OMP_NUM_THREADS": "1"}, **pipes))
        return started[-1]

    yield host
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as one:
        one.bind((address, 0))
        return one.getsockname()[1]


def test_ranks_of_one_host_listen_on_the_loopback_address_only(host):
    with listening() as seen:
        output = host(0, 1, "127.0.0.1:0", "", **seen.environment).communicate(timeout=120)[0]
    assert output.count("[(0, False), (1, False)]") == 2, output
    assert seen.at and not seen.exposed(), seen.exposed()


def test_hosts_meet_through_the_relay_and_ranks_do_not_get_the_secret(host):
    """127.0.0.2 stands for the first host's address in the network; the other starts first, and waits."""
    address = f"127.0.0.2:{free_port('127.0.0.2')}"
    other, first = host(1, 2, address, "secret"), host(0, 2, address, "secret")
    outputs = [one.communicate(timeout=120)[0] for one in (first, other)]
    assert [output.count("[(0, False), (1, False), (2, False), (3, False)]") for output in outputs] == [2, 2], outputs


def test_several_hosts_without_a_secret_do_not_start(host):
    output = host(0, 2, f"127.0.0.2:{free_port('127.0.0.2')}", "").communicate(timeout=120)[0]
    assert "2 hosts need the same secret in GANG_KEY on each of them" in output


@pytest.fixture
def guarded():
    """A store's port next to a relay with the key "right": the address of the relay, and the store's listener."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        store.settimeout(1)
        address = ("127.0.0.1", free_port())
        relay.admit(address, b"right", store.getsockname()[1])
        yield address, store


def test_bytes_pass_the_relay_both_ways(guarded):
    address, store = guarded
    port = relay.reach(address, b"right", within=5)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as guest:
        guest.sendall(b"ping" * 100_000)
        connection, _ = store.accept()
        with connection:
            assert connection.recv(4) == b"ping"
            connection.sendall(b"pong")
            assert guest.recv(4) == b"pong"


class Command:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("sent", [b"", bytes(1000), pickle.dumps(Command()) * 50], ids=["nothing", "zeros", "pickle"])
def test_a_stranger_does_not_reach_the_store(guarded, sent, monkeypatch):
    monkeypatch.setattr(relay, "ANSWERED", 0.3)
    address, store = guarded
    with socket.create_connection(address, timeout=5) as stranger:
        stranger.sendall(sent)
        while stranger.recv(4096):  # a nonce and a proof, then the end
            pass
    with pytest.raises(TimeoutError):
        store.accept()


def test_a_wrong_key_does_not_pass(guarded):
    address, store = guarded
    port = relay.reach(address, b"wrong", within=5)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as guest:
        guest.sendall(b"secret data")
        with contextlib.suppress(ConnectionResetError):  # closed before it has read all
            assert guest.recv(1) == b""
    with pytest.raises(TimeoutError):
        store.accept()
