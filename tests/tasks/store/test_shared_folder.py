"""A store in a folder that two accounts of this host share through a group."""

import grp
import os
import pwd
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contract.faults import Fault
from tasks.store import open_store

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes as other users")
ACCOUNTS = ("nobody", "daemon")
GROUP = "users"


def run_as(account: str, work: Callable[[], None], umask: int = 0o022) -> str:
    """Run `work` in a process of the account, which is also in the group. Returns the error, or ""."""
    user, group = pwd.getpwnam(account), grp.getgrnam(GROUP)
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        return said
    error = ""
    try:
        os.setgroups([group.gr_gid])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        os.umask(umask)
        work()
    except BaseException as fault:
        error = f"{type(fault).__name__}: {fault}"
    os.write(write, error.encode())
    os._exit(0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Not in tmp_path, which only root may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        root = Path(folder) / "store"
        root.mkdir()
        os.chown(root, -1, grp.getgrnam(GROUP).gr_gid)
        root.chmod(0o2770)
        for account in ACCOUNTS:
            own = Path(folder) / account
            own.mkdir(mode=0o700)
            os.chown(own, pwd.getpwnam(account).pw_uid, -1)
        yield root


def put(store: Path, own: Path, name: str) -> None:
    (own / name).write_text(f"content of {name}")
    open_store(str(store)).put(own, f"train/{name}/files")
    open_store(str(store)).write(f"runs/{name}.json", b"{}")


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_two_users_share_a_store(shared: Path, umask: int):
    first, second = ACCOUNTS
    homes = {account: shared.parent / account for account in ACCOUNTS}
    assert run_as(first, lambda: put(shared, homes[first], "one"), umask) == ""
    assert run_as(second, lambda: put(shared, homes[second], "two"), umask) == ""

    def read() -> None:
        store = open_store(str(shared))
        assert (store.root / "train/one/files/one").read_text() == "content of one"
        tag = (store.read("runs/one.json") or (b"", ""))[1]
        assert store.replace("runs/one.json", b'{"more": 1}', tag), "a run of the other user takes over"
        assert store.delete("train/one/files") > 0, "garbage collection of all owners"

    assert run_as(second, read, umask) == ""
    assert open_store(str(shared)).read("train/two/files/two")
    group = grp.getgrnam(GROUP).gr_gid
    assert {path.stat().st_gid for path in shared.rglob("*")} == {group}


def test_a_folder_of_one_user_stays_private(shared: Path):
    first, second = ACCOUNTS
    private = shared.parent / first / "store"
    assert run_as(first, lambda: open_store(str(private)).write("runs/one.json", b"{}") and None) == ""
    said = run_as(second, lambda: open_store(str(private)).write("runs/two.json", b"{}") and None)
    assert said.startswith(Fault.__name__) and str(private) in said and "\n" not in said
