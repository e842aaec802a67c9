"""tasks/run/lease.py: one of several works, and whoever is gone or silent for too long loses the work."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from contract import ownership
from contract.faults import Fault, Stopped
from tasks.run import artifact, lease
from tasks.run.artifact import Artifact
from tasks.run.lease import Lost, hold, holder
from tasks.store import open_store
from tests.support import s3_server
from tests.tasks.run.toy_stage import STAGE, get_or_make, makings

ROOT = Path(__file__).parents[3]
KEY = "toy/0123/lease.json"


@pytest.fixture(params=["file", "s3"])
def store(request, tmp_path, monkeypatch):
    if request.param == "file":
        return open_store(str(tmp_path / "store"))
    import boto3

    for key, value in s3_server.ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_url"))
    bucket = f"bucket-{random.randrange(10**12)}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return open_store(f"s3://{bucket}/prefix")


@pytest.fixture
def file(tmp_path):
    return open_store(str(tmp_path / "store"))


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(lease, "RENEWED", 0.1)
    monkeypatch.setattr(lease, "EXPIRES", 1.0)
    monkeypatch.setattr(lease, "POLLED", 0.02)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts processes that want the toy artifact; ends them with the test."""
    processes = []

    def start(store, mode: str, **variables: str) -> subprocess.Popen:
        times = {"RENEWED": "0.1", "EXPIRES": "1.0", "POLLED": "0.02"} | variables
        command = [sys.executable, ROOT / "tests/tasks/run/toy_stage.py", store.uri, tmp_path, mode]
        environment = os.environ | times | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        with process:
            pass


def until(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def forged(**changes) -> bytes:
    """A lease as a process of another host has it."""
    content = {"id": "f" * 16, "beat": 7, "about": "flow-1", "host": "elsewhere", "boot": "b", "pid": 7, "started": "9"}
    return json.dumps(content | changes).encode()


def test_several_that_want_the_same_do_the_work_once(store, start, tmp_path):
    processes = [start(store, "slow") for _ in range(4)]
    ends = [process.communicate(timeout=60)[0].splitlines()[-1].split() for process in processes]
    assert sorted(word for word, _ in ends) == ["cached", "cached", "cached", "made"]
    assert len({digest for _, digest in ends}) == 1
    assert makings(tmp_path) == ["toy"]
    assert "lease.json" not in store.keys(STAGE.key)


def test_a_killed_holder_of_this_host_is_replaced_at_once(store, start, tmp_path):
    """Long before its lease would expire."""
    killed = start(store, "stopped", EXPIRES="60")
    until(lambda: makings(tmp_path))
    other = start(store, "well", EXPIRES="60")
    assert "waits for toy (process " in other.stdout.readline()
    began = time.monotonic()
    killed.kill()
    rest = other.communicate(timeout=60)[0]
    assert "which has died" in rest and rest.splitlines()[-1].startswith("made")
    assert time.monotonic() - began < 30


def test_a_silent_holder_of_another_host_is_replaced_after_a_while(store):
    store.create(KEY, forged())
    said, began = [], time.monotonic()
    with hold(store, KEY, said.append):
        assert time.monotonic() - began >= lease.EXPIRES
    assert said == [
        "waits for flow-1 (process 7 on elsewhere), which makes this artifact",
        "takes over from flow-1 (process 7 on elsewhere), which has died",
    ]
    assert store.read(KEY) is None


def test_a_holder_that_renews_is_waited_for(file):
    """Whatever its clock says: only changes count."""
    file.create(KEY, forged())
    done = threading.Event()

    def renew():
        for beat in range(15):
            time.sleep(0.1)
            file.write(KEY, forged(beat=beat))
        file.remove(KEY)
        done.set()

    thread = threading.Thread(target=renew)
    thread.start()
    with hold(file, KEY, lambda _: None):
        assert done.is_set()
    thread.join()


def test_a_pid_that_was_given_again_is_no_holder(file):
    file.create(KEY, forged(**ownership.me() | {"started": "1"}))
    began = time.monotonic()
    with hold(file, KEY, lambda _: None):
        assert time.monotonic() - began < 0.5


@pytest.mark.parametrize("content", [b"", b"not JSON", b"\xff", b"[]", b'{"id": "x"}'])
def test_a_damaged_lease_expires_like_another(file, content, monkeypatch):
    monkeypatch.setattr(lease, "EXPIRES", 0.4)
    file.create(KEY, content)
    assert holder(file, KEY) is None
    said, began = [], time.monotonic()
    with hold(file, KEY, said.append):
        assert lease.EXPIRES <= time.monotonic() - began < lease.EXPIRES + 1
    assert len(said) == 2


def test_a_lease_that_is_damaged_while_it_is_held_is_lost(file):
    with hold(file, KEY, lambda _: None) as held:
        file.write(KEY, b"")
        until(held.lost.is_set)
        with pytest.raises(Lost):
            held.confirm()
    assert file.read(KEY)[0] == b""  # not ours to remove


def test_it_is_renewed_and_released_whatever_happens(store):
    with pytest.raises(KeyError), hold(store, KEY, lambda _: None, "flow-2") as held:
        first = store.read(KEY)
        assert holder(store, KEY) == f"flow-2 (process {os.getpid()} on {ownership.me()['host']})"
        until(lambda: store.read(KEY) != first)
        held.confirm()
        raise KeyError
    assert store.read(KEY) is None and holder(store, KEY) is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lease ")]


def test_stopped_while_it_waits(file):
    file.create(KEY, forged())
    began = time.monotonic()
    with pytest.raises(Stopped), hold(file, KEY, lambda _: None, stop=lambda: time.monotonic() - began > 0.2):
        pass
    assert file.read(KEY)[0] == forged()


# Whoever was silent for too long


@pytest.mark.parametrize("other", ["has made it", "is making it"])
def test_a_holder_that_slept_beyond_its_time_records_nothing(store, start, tmp_path, other):
    asleep = start(store, "stopped")
    until(lambda: makings(tmp_path) and Path(f"/proc/{asleep.pid}/stat").read_text().split()[2] == "T")
    taken = []

    def wake(work=None):
        asleep.send_signal(signal.SIGCONT)
        taken.append(asleep.communicate(timeout=60)[0])

    made = get_or_make(store, tmp_path, then=wake if other == "is making it" else lambda work: None)
    if other == "has made it":
        wake()
    assert not made.cached
    assert "tasks.run.lease.Lost" in taken[0] and "taken over by another flow" in taken[0]
    found = artifact.find(STAGE, store, deep=True)
    assert isinstance(found, Artifact) and found.digest == made.digest
    assert makings(tmp_path) == ["toy", "toy"]


def test_a_record_that_a_sleeper_wrote_all_the_same_is_written_over(file, tmp_path):
    """It was stopped between its last look at the lease and its record."""
    stale = get_or_make(file, tmp_path, "stale")
    record = f"{STAGE.key}/{artifact.RECORD}"

    def then(work):
        file.write(record, artifact._encode(stale))

    made = get_or_make(file, tmp_path, "fresh", make_again=True, then=then)
    assert artifact.read(file, STAGE.key).digest == made.digest != stale.digest


def test_confirm_asks_the_store_before_its_thread_has(file, monkeypatch):
    """A process that was just woken: the thread that renews has had no turn yet."""
    monkeypatch.setattr(lease, "RENEWED", 60.0)
    with hold(file, KEY, lambda _: None) as held:
        held.confirm()
        file.write(KEY, forged())
        time.sleep(lease.EXPIRES / 2 + 0.1)
        with pytest.raises(Lost):
            held.confirm()
    assert file.read(KEY)[0] == forged()


# A store that fails


class Failing:
    """The store, but for the calls that are to fail."""

    def __init__(self, store, *names):
        self.store, self.names = store, {*names}

    def __getattr__(self, name):
        if name in self.names:
            raise Fault("the store cannot be reached")
        return getattr(self.store, name)


def test_a_short_outage_costs_nothing(file):
    failing = Failing(file)
    with hold(failing, KEY, lambda _: None) as held:
        failing.names = {"replace", "read"}
        time.sleep(0.4)
        failing.names = set()
        before = file.read(KEY)
        until(lambda: file.read(KEY) != before)
        held.confirm()
        assert not held.lost.is_set()
    assert file.read(KEY) is None


def test_a_long_outage_costs_the_lease(file):
    failing = Failing(file)
    with hold(failing, KEY, lambda _: None) as held:
        failing.names = {"replace", "read"}
        until(held.lost.is_set)
        with pytest.raises(Lost):
            held.confirm()


def test_an_error_while_it_looks_who_has_it_ends_nothing(file):
    """The answer to a renewal was lost, and then the store was away for a moment."""
    failing = Failing(file)
    with hold(failing, KEY, lambda _: None) as held:
        failing.names = {"read"}
        file.write(KEY, json.dumps(held._content).encode())
        time.sleep(0.3)
        failing.names = set()
        before = file.read(KEY)
        until(lambda: file.read(KEY) != before)
        held.confirm()


def test_a_release_that_fails_hides_no_other_error(file):
    failing = Failing(file)
    with pytest.raises(KeyError), hold(failing, KEY, lambda _: None):
        failing.names = {"remove"}
        raise KeyError
