"""flows/logs.py: gangs are listed, and what their ranks have printed is found, in a folder and in S3."""

import threading
import time
from types import SimpleNamespace

import pytest

from flows import logs
from tasks.gang.board import Board
from tasks.gang.history import timeline
from tasks.gang.history.timeline import History, Teller
from tasks.gang.messages import Member, Word
from tasks.run import lease
from tasks.store import open_store
from tests.support import s3_server

GANG = "train-6a8e000000000000"
HOSTS = {0: "a", 1: "b"}
NODES = {k: Member("x", name, "running", f"10.0.0.{k}") for k, name in HOSTS.items()}

BOTH = pytest.mark.parametrize("world", ["folder", "s3"], indirect=True)


@pytest.fixture(scope="module")
def s3(s3_url):
    environment = s3_server.ENVIRONMENT | {"AWS_ENDPOINT_URL": s3_url}
    s3_server.make_bucket(environment)
    return environment


@pytest.fixture
def world(request, tmp_path, monkeypatch, capsys):
    uri = str(tmp_path / "store")
    if getattr(request, "param", "folder") == "s3":
        uri = f"s3://finetune/{tmp_path.name}"
        for name, value in request.getfixturevalue("s3").items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("FINETUNE_STORE", uri)
    monkeypatch.setattr(logs, "POLLED", 0.05)
    monkeypatch.setattr(logs, "AGAIN_WITHIN", 0.0)
    store = open_store(uri)
    teller = Teller(History(GANG, "tiny", "tiny-1121"), tmp_path / "metrics", lambda news: timeline.write(store, news))

    def attempt(number: int) -> Board:
        board = Board(store, GANG, number)
        teller.begins(number)
        board.write("resolved.yaml", b"layout: {nodes: 2, gpus_per_node: 2}")
        for k, node in NODES.items():
            board.write(f"nodes/{k}.json", node.to_json())
        board.write("gang.json", Word("x", "go", order=(*HOSTS,)).to_json())
        teller.trains(HOSTS, NODES, 2, 0)
        return board

    def end(board: Board, how: str, following: str = "") -> None:
        teller.ends(how)
        if following:
            teller.follows(following)
        board.write("gang.json", Word("x", "stop", order=(*HOSTS,), closed=True).to_json())

    def ask(*arguments: str):
        code = logs.main(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return SimpleNamespace(store=store, teller=teller, attempt=attempt, end=end, ask=ask, capsys=capsys)


@pytest.fixture
def two(world):
    """Of two attempts the second is done."""
    first = world.attempt(1)
    for k in HOSTS:
        for rank in (2 * k, 2 * k + 1):
            first.write(f"logs/{k}/rank{rank:05d}.out.00000", f"rank {rank} one\nrank {rank} t".encode())
            first.write(f"logs/{k}/rank{rank:05d}.out.00001", b"wo\n")
        first.write(f"logs/{k}/torchrun.log.00000", f"torchrun {k}\n".encode())
    first.write("logs/1/rank00003.err.00000", b"why\n")
    world.end(first, "host: b no longer answers", "resumes from step 10")
    second = world.attempt(2)
    for piece in range(21):
        lines = "".join(f"line {piece * 10 + i} \N{SNOWMAN}\n" for i in range(10)).encode()
        cut = 1 if piece else 0  # in the middle of a character
        tail = b"" if piece == 20 else b"\xe2"
        second.write(f"logs/0/rank00000.out.{piece:05d}", (b"\x98\x83 begun\n" if cut else b"") + lines + tail)
    second.write("logs/0/rank00000.out.00021", b"no end")
    with world.teller.over():
        world.end(second, "done")
    return world


@BOTH
def test_without_arguments_it_lists_gangs(two):
    code, output, _ = two.ask()
    head, hosts, first, second = output.splitlines()
    assert code == 0 and head == f"{GANG}  tiny  tiny-1121  done" and hosts == "    hosts a, b"
    assert first.startswith("      1  ") and first.endswith("host: b no longer answers; resumes from step 10")
    assert second.startswith("      2  ") and second.endswith("  done")


def test_the_time_of_a_gang_is_listed_while_it_trains(world, tmp_path, monkeypatch):
    seconds = {"training": 1.0, "lost": 1.0}
    world.teller.work, world.teller.spends = tmp_path, lambda attempts: dict(seconds)
    world.attempt(1)
    assert "\n    time 50.0% effective: " in world.ask()[1]
    seconds["training"] = 3.0
    world.teller.tick()
    assert "\n    time 50.0% effective: " in world.ask()[1]
    monkeypatch.setattr(timeline, "LIVE", 0.0)
    world.teller.tick()
    assert "\n    time 75.0% effective: training 75.0%, lost 25.0%\n" in world.ask()[1]


@BOTH
def test_an_empty_store_lists_nothing_and_has_nothing(world):
    code, output, _ = world.ask()
    assert code == 0 and output.startswith("no gang has trained yet, in ")
    assert world.ask("--tail", "3")[2].startswith("error: no gang has trained yet, in ")
    code, _, errors = world.ask("train-1")
    assert code == 2 and errors == "error: train-1: no such gang; there are none\n"


def test_a_gang_whose_flow_is_gone_is_said_to_be_nobody_s(world, monkeypatch):
    monkeypatch.setattr(lease, "RENEWED", 0.3)
    world.attempt(1)
    assert "  no flow controls it\n" in world.ask()[1]
    with lease.hold(world.store, f"{GANG.replace('-', '/')}/lease.json", print):
        assert "  attempt 1 trains on 2 hosts\n" in world.ask()[1]


@pytest.mark.parametrize("name", [GANG, "train-6a", "6a8e", "train/6a8e", "tiny", "tiny-1121"])
def test_names(two, name):
    assert two.ask(name, "--attempt", "1")[:2] == (0, "rank 0 one\nrank 0 two\n")


@BOTH
def test_the_newest_attempt_that_trained_is_shown(two):
    code, output, errors = two.ask(GANG)
    lines = output.splitlines()
    assert code == 0 and errors == f"{GANG}, attempt 2, rank 0 on a, stdout\n"
    assert lines[0] == "line 0 \N{SNOWMAN}" and lines[-2:] == ["line 209 \N{SNOWMAN}", "no end"]
    assert lines[10] == "\N{SNOWMAN} begun" and len(lines) == 210 + 20 + 1
    two.teller.begins(3)  # whose hosts have not come
    assert two.ask(GANG)[1] == output


@pytest.mark.parametrize("count", [0, 1, 2, 11, 12, 13, 100, 1000])
def test_tail(two, count):
    lines = two.ask(GANG)[1].splitlines()
    assert two.ask(GANG, "--tail", str(count))[1].splitlines() == (lines[-count:] if count else [])


@BOTH
def test_of_a_rank_a_host_or_torchrun(two):
    ask = ("tiny", "--attempt", "1")
    assert two.ask(*ask, "--rank", "3")[1] == "rank 3 one\nrank 3 two\n"
    assert two.ask(*ask, "--rank", "3", "--err")[1] == "why\n"
    of_b = "==> rank 2 on b <==\nrank 2 one\nrank 2 two\n==> rank 3 on b <==\nrank 3 one\nrank 3 two\n"
    assert two.ask(*ask, "--host", "b")[1] == of_b
    assert two.ask(*ask, "--torchrun")[1] == "==> torchrun on a <==\ntorchrun 0\n==> torchrun on b <==\ntorchrun 1\n"


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["train-6a8f"], f"train-6a8f: no such gang; did you mean {GANG}? there are {GANG}, tiny, tiny-1121"),
        (["tiny", "--attempt", "3"], f"--attempt: 3: {GANG} has 1 to 2"),
        (["tiny", "--rank", "4"], "--rank: 4 is not a rank of attempt 2, which has 0 to 3"),
        (["tiny", "--host", "bb"], "--host: bb: no host of attempt 2; did you mean b? there are a, b"),
    ],
)
def test_a_fault_is_one_line(two, arguments, complaint):
    assert two.ask(*arguments) == (2, "", f"error: {complaint}\n")


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--rank", "1", "--host", "a"], "not allowed with argument --rank"),
        (["--rank", "x"], "invalid int value: 'x'"),
        (["--tail", "-1"], "--tail: -1 is not a number of lines"),
        (["--torchrun", "--err"], "--err: torchrun has one log"),
    ],
)
def test_a_faulty_call_is_one_line(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as raised:
        logs.main(arguments)
    errors = capsys.readouterr().err
    assert raised.value.code == 2 and complaint in errors and errors.count("\n") == 1


def test_a_name_of_several_gangs_lists_them(two):
    other = "train-6b00000000000000"
    timeline.write(two.store, History(other, "tiny", "tiny-1122", two.teller.history.attempts, "done"))
    code, _, errors = two.ask("tiny")
    assert code == 2 and errors.startswith("error: tiny: names 2 gangs, the newest first: train-6")
    assert other in errors and GANG in errors


def test_a_gang_without_a_history_is_read_from_its_board(two):
    two.store.remove(f"{timeline.FOLDER}/{GANG}.json")
    assert two.ask(GANG, "--attempt", "1", "--host", "b", "--tail", "1")[1].splitlines()[1::2] == [
        "rank 2 two",
        "rank 3 two",
    ]


@BOTH
def test_follow_goes_on_with_the_next_attempt(world):
    first = world.attempt(1)
    answer: list = []
    follower = threading.Thread(target=lambda: answer.append(logs.main(["tiny", "--follow"])), daemon=True)
    first.write("logs/0/rank00000.out.00000", b"step 1\nst")
    follower.start()
    shown = ""

    def wait_for(text: str) -> None:
        nonlocal shown
        until = time.monotonic() + 10
        while text not in shown:
            assert time.monotonic() < until, shown
            time.sleep(0.02)
            shown += world.capsys.readouterr().out

    wait_for("step 1\n")
    first.write("logs/0/rank00000.out.00001", b"ep 2\n")
    wait_for("step 1\nstep 2\n")
    world.end(first, "host: b no longer answers", "resumes from step 0")
    second = world.attempt(2)
    second.write("logs/0/rank00000.out.00000", b"step 3\nlast")
    with world.teller.over():
        world.end(second, "done")
    follower.join(10)
    shown += world.capsys.readouterr().out
    assert shown == "step 1\nstep 2\nstep 3\nlast\n" and answer == [0]
