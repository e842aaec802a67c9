"""A training of two hosts with a disk of each host's own: only the store is shared."""

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from conf.load import load
from tasks.gang import controller
from tasks.gang.attempt import Gang
from tasks.gang.board import Board
from tasks.gang.engines import Demand
from tasks.gang.history.timeline import History, Teller
from tasks.gang.job import Training
from tasks.store import open_store
from tests.tasks.gang.conftest import losses, same, wait_for

ROOT = Path(__file__).parents[3]
# A member that does not see the controller's folder, as on another machine.
MEMBER = "import sys; from tasks.gang import member; member._probe = lambda word: ''; sys.exit(member.main())"


@dataclass
class Hosts:
    """An engine whose hosts are folders: FINETUNE_RUNS of each."""

    folder: Path
    names: list[str]
    running: dict[str, subprocess.Popen] = field(default_factory=dict)

    def turn(self, demand: Demand) -> str | None:
        return None

    def capacity(self, demand: Demand, without: tuple[str, ...] = ()) -> str | None:
        return None

    def available(self, demand: Demand, without: tuple[str, ...] = ()) -> int | None:
        return len(self.names)

    def start(self, demand: Demand, board: Board, n: int, without: tuple[str, ...] = ()) -> "Hosts":
        self.running = {}
        for node, name in enumerate([name for name in self.names if name not in without][:n]):
            line = [sys.executable, "-c", MEMBER, "--store", board.store.uri, "--gang", board.gang]
            line += ["--attempt", str(board.attempt), "--node", str(node)]
            own = {"FINETUNE_RUNS": str(self.folder / name), "GANG_HOST": name, "GANG_ADDRESS": "127.0.0.1"}
            with (self.folder / f"{name}.log").open("a") as log:
                self.running[name] = subprocess.Popen(
                    line, cwd=ROOT, env=os.environ | own | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
                )
        return self

    def alive(self) -> dict[int, bool | None]:
        return {node: process.poll() is None for node, process in enumerate(self.running.values())}

    def waits(self) -> str | None:
        return None

    def words(self) -> tuple[str, ...]:
        return ()

    def cancel(self) -> None:
        for process in self.running.values():
            process.terminate()
            process.wait(60)

    def lose(self, name: str) -> None:
        """The host and its disk are gone."""
        self.names.remove(name)
        self.running[name].kill()
        shutil.rmtree(self.folder / name)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_host_is_lost_with_its_disk(work, alone, tmp_path, monkeypatch):
    runs = tmp_path / "flow"
    monkeypatch.setenv("FINETUNE_RUNS", str(runs))
    folder = runs / "work/train-1"
    (folder / "files").mkdir(parents=True)
    paths = [f"paths.output={folder}/files", f"paths.logs={folder}/logs", f"paths.parity={folder}/files/parity.json"]
    paths += [f"paths.data={work}/one/data"]  # prepared
    run = load(str(work / "conf.yaml"), [*paths, "layout.nodes=2", "gang.preflight=false", "checkpoint.keep=2"])
    hosts, lines = Hosts(tmp_path, ["a", "b", "c"]), []
    store, teller = open_store(str(tmp_path / "store"), hasty=True), Teller(History("train-1", "gang", ""), folder)
    gang = Gang("train-1", folder, Training(run), store, cast(Any, hosts), teller, lines.append, lambda: False)
    thread = threading.Thread(target=controller.carry_out, args=(gang,), daemon=True)
    thread.start()
    wait_for(lambda: gang.copies.newest() >= 10, 200)
    hosts.lose("b")
    thread.join(200)
    assert not thread.is_alive() and same(losses(folder / "files"), alone)
    assert "host: b no longer answers; continues without b" in lines
    kept = {name.split("/")[1] for name in gang.stored}
    assert kept == {"iter_0000030", "iter_0000040"} and store.changed(gang.copies.files, gang.stored) == {}
    mark = json.loads((folder / "files/checkpoints/iter_0000040/complete.json").read_text())
    assert mark["step"] == 40 and {f"checkpoints/iter_0000040/{name}" for name in mark["files"]} <= {*gang.stored}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= {*mark["files"]}
    assert (folder / "files/parity.json").exists()
    for name in ("a", "c"):  # nothing is left on the hosts' disks
        assert not (tmp_path / name / "work/train-1/files").exists()
