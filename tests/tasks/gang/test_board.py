"""What members and controller make of the board: who may write, who lives, and when a member has to end."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from contract.faults import Fault
from tasks.gang import member_link as links
from tasks.gang import peer_probe
from tasks.gang.board import STALE, Board, Watch, newest_attempt
from tasks.gang.controller_link import Lookout
from tasks.gang.member_link import Link
from tasks.gang.messages import End, Member, Peers, Standing
from tasks.store import open_store
from tests.tasks.gang.conftest import wait_for

ROOT = Path(__file__).parents[3]


@pytest.fixture
def board(tmp_path) -> Board:
    return Board(open_store(str(tmp_path / "store")), "gang", 1)


def member(board: Board, node: int = 0) -> Link:
    return Link(board, node, Member(f"member {node}", f"host{node}", "waiting"))


def test_one_member_per_number_and_none_joins_what_is_over(board):
    lookout = Lookout(board, "", print)
    assert lookout.begin()
    assert not Lookout(board, "", print).begin()
    first = member(board)
    assert first.join()
    assert not member(board).join()
    wait_for(lambda: 0 in lookout.nodes and lookout.nodes[0].state == "waiting")
    lookout.say(state="stop", reason="over")
    wait_for(lambda: first.why_stop() == "stop: over")
    assert not member(board, 1).join()
    first.end(5)
    lookout.end(5)
    assert newest_attempt(board.store, "gang") == 1


def test_what_a_member_says_reaches_the_controller_and_so_does_its_log(board, tmp_path):
    lines: list[str] = []
    lookout = Lookout(board, "", lines.append)
    lookout.begin()
    one = member(board)
    one.join()
    log = tmp_path / "log"
    log.write_text("step 1\nste")
    one.logs = {"rank00000.out": log}
    end = End(rank=0, code=1, step=3, lines=("ValueError: x",), silent=False, state="", stalled=False)
    one.say(state="failed", failed=(end,))
    wait_for(lambda: 0 in lookout.nodes and lookout.nodes[0].failed == (end,))
    assert lookout.order_of_failure(0) == 0
    wait_for(lambda: lines == ["step 1"])
    log.write_text("step 1\nstep 2\n")
    one.end(5)
    lookout.end(5)
    assert lines == ["step 1", "step 2"]


def test_a_member_of_another_version_is_named_and_no_other_suffers(board):
    lookout = Lookout(board, "", print)
    lookout.begin()
    one = member(board)
    one.join()
    board.write("nodes/1.json", b'{"by": "1", "host": "host1", "state": "waiting", "colour": "red"}')
    wait_for(lambda: lookout.foreign and 0 in lookout.nodes)
    with pytest.raises(
        Fault, match=r"^gangs/gang/1/nodes/1\.json: not a Member .* \(colour: Unexpected keyword argument\);"
    ):
        lookout.check()
    one.end(5)
    lookout.end(5)


def test_a_controller_of_another_version_ends_a_member(board):
    lookout = Lookout(board, "", print)
    lookout.begin()
    one = member(board)
    one.join()
    lookout.board.write("gang.json", b'{"by": "x", "state": "going"}')
    wait_for(lambda: "(state: Input should be 'gathering', 'go' or 'stop')" in one.why_stop())
    one.end(5)
    lookout.end(5)


def test_a_store_that_says_itself_that_it_is_away_ends_nobody(board, monkeypatch):
    """S3 that does not answer is a Fault, and so is another version's message: members took the one for the other."""
    lookout = Lookout(board, "", print)
    lookout.begin()
    one = member(board)
    one.join()
    wait_for(lambda: 0 in lookout.nodes)
    asked = []

    def away(_, name: str) -> None:
        asked.append(name)
        raise Fault("s3://finetune/main: http://s3 does not answer (ReadTimeoutError)")

    with monkeypatch.context() as patch:
        patch.setattr(type(board.store), "read", away)
        board.write("nodes/1.json", b"{}")  # the controller has something to read, too
        wait_for(lambda: {name.rpartition("/")[2] for name in asked} >= {"gang.json", "1.json"})
    assert one.why_stop() == "" and not lookout.foreign
    one.end(5)
    lookout.end(5)


@pytest.mark.parametrize("attempts", [0, 1, 2, 3, 4, 7, 8, 9, 30])
def test_the_newest_attempt_is_found(board, attempts):
    for number in range(1, attempts + 1):
        board.store.write(f"gangs/gang/{number}/gang.json", b"{}")
    assert newest_attempt(board.store, "gang") == attempts


def test_a_member_knows_the_others_once_the_controller_has_said_go(board):
    lookout = Lookout(board, "", print)
    lookout.begin()
    one = member(board)
    one.join()
    lookout.peers = Peers({"0": ("10.0.0.1", 1), "1": ("10.0.0.2", 2)})
    lookout.say(state="go")
    wait_for(lambda: one._witnesses() == [("10.0.0.2", 2)])
    one.end(5)
    lookout.end(5)


def test_a_message_that_another_has_written_is_lost(board):
    mine = Link(board, 0, Member("me", "host0", "waiting"))
    assert mine.create()
    assert mine._write(Member("me", "host0", "running"))
    board.write("nodes/0.json", json.dumps({"by": "you"}).encode())
    assert not mine._write(Member("me", "host0", "done"))
    assert board.read("nodes/0.json") == {"by": "you"}


def test_only_what_changes_is_alive():
    watch = Watch()
    assert watch.look({"beats/0": "a", "beats/1": "a"}) == {"beats/0", "beats/1"}
    watch.at = {name: at - 20 for name, at in watch.at.items()}
    assert watch.look({"beats/0": "b", "beats/1": "a"}) == {"beats/0"}
    assert watch.age("beats/0") < 1 and watch.age("beats/1") >= 20
    watch.forgive()
    assert watch.age("beats/1") < 1


@pytest.mark.parametrize(
    "answered, fresh, witnessed, ends",
    [
        (0, 0, 0, ""),
        (1, STALE + 2, 0, "the controller is gone"),
        (STALE + 1, STALE + 2, 0, ""),  # the store is away, a witness is there
        (STALE + 1, 2 * STALE + 2, 0, ""),
        (STALE + 1, STALE + 1, STALE + 1, "cut off"),
        (60, 60, 0, ""),
    ],
)
def test_when_a_member_has_to_end(board, answered, fresh, witnessed, ends):
    one, now = member(board), time.monotonic()
    one.answered, one.fresh, one.witnessed = now - answered, now - fresh, now - witnessed
    assert one.why_stop().startswith(ends) and bool(one.why_stop()) == bool(ends)


def test_a_witness_that_knows_of_a_later_attempt_ends_it(board, monkeypatch):
    monkeypatch.setattr(links, "WITNESS_AFTER", 0.0)
    port = peer_probe.serve(lambda: Standing("gang", 2, "go"))
    lookout = Lookout(board, "", print)
    lookout.begin()
    one = member(board)
    one.met = True
    one.join()
    one.word = replace(one.word, addresses=("127.0.0.1",), port=port)
    one.board.store.delete("")
    one.answered = time.monotonic() - 1
    wait_for(lambda: "attempt" in one.why_stop())
    one.end(0)
    lookout.end(0)


RANK = """
import os, sys
os.environ.update(RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2],
                  GANG_ATTEMPT=sys.argv[3])
from trainer.startup import heartbeat
heartbeat.MEET_WITHIN = 4.0
heartbeat.meet()
print("met")
"""


def test_a_rank_of_a_dead_attempt_never_gets_by_a_new_master():
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, rank, str(master.port), name], env=environment, **pipes)
        for rank, name in (("0", "gang-2"), ("1", "gang-1"), ("1", "gang-2"))
    ]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [out.strip() for out, _ in said] == ["met", "", "met"], said
    assert "1 of 2 ranks of gang-1 met" in said[1][1]
