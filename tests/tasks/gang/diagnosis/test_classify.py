"""tasks/gang/diagnosis/classify.py. The texts in tests/assets/failures.tsv were seen by others or here; the table says
where."""

import csv
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.load import load
from tasks.gang.diagnosis.causes import ECHO, LINK, OWN, XIDS, read
from tasks.gang.diagnosis.classify import Evidence, Failure, Rank, classify
from tasks.gang.diagnosis.evidence import of_attempt
from tasks.gang.messages import Member, Sign

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 GiB "
    "of which 1.22 GiB is free. Including non-PyTorch memory, this process has 77.88 GiB memory in use."
)
GLOO_CLOSED = (
    "[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
    "[127.0.0.1]:49570"
)
GLOO_RESET = (
    "[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:2968: "
    "Connection reset by peer"
)
NCCL_REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote "
    "process exited or there was a network error, NCCL version 2.21.5"
)
WATCHDOG = (
    "[rank{0}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran "
    "for 600060 milliseconds before timing out."
)
RDMA = (
    "host-1:984:1357 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 172.36.143.59<44206> with "
    "status=12 opcode=129 len=65536 vendor err 129 (Recv) localGid ::ffff:29.87.88.182 remoteGids::ffff:29.87.4.221"
)
XID = "[74889.644131] NVRM: Xid (PCI:0000:02:00): {}, pid=1101234, name=python, whatever follows"
TORCHRUN = (
    "W1121 10:26:03.814000 30229 torch/distributed/elastic/multiprocessing/api.py:1012] Sending process 30234 closing "
    "signal SIGTERM",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "  traceback : Signal 15 (SIGTERM) received by PID 30234",
)
STRENGTHS = {"own": OWN, "link": LINK, "echo": ECHO}


def golden() -> list[dict[str, str]]:
    with (Path(__file__).parents[3] / "assets/failures.tsv").open() as rows:
        return list(csv.DictReader(rows, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.parametrize("row", golden(), ids=lambda row: row["text"][:40])
def test_texts_are_known(row):
    cause = read([row["text"]])
    assert cause is not None
    assert (cause.kind, cause.strength) == (row["kind"], STRENGTHS[row["strength"]])
    assert (cause.retry, cause.blames) == (row["retry"] == "yes", row["blames"] == "yes")


@pytest.mark.parametrize(
    "line",
    [
        "step 12/100  loss 5.4321  grad norm 0.8  lr 1e-4  0.20 s  5000 tokens/s  left 00:00:18",
        "NCCL INFO Connected all rings",
        "[1.0] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01",
        "running with world 4, tp 2, sp True, pp 1, vpp None, cp 1, dp 2, ep 2, etp 1, recompute none",
        "[2.0] NVRM: Xid (PCI:0000:02:00): 45, pid=3, Ch 00000008",
    ],
)
def test_what_is_no_failure_is_none(line):
    assert read([line]) is None


def test_an_address_is_read_from_the_line():
    cause = read([RDMA])
    assert cause and cause.peer == "172.36.143.59"


def test_own_causes_come_before_echoes_whatever_the_order():
    ranks = (
        Rank(0, "a", 1, 12, (GLOO_CLOSED,), order=1),
        Rank(1, "a", -signal.SIGTERM, 12, TORCHRUN, order=2),
        Rank(2, "b", 1, 12, ("Traceback (most recent call last):", OOM), order=3),
        Rank(3, "b", 1, 12, (NCCL_REMOTE, WATCHDOG.format(3)), order=4),
    )
    failure = classify(Evidence(ranks))
    assert (failure.kind, failure.rank, failure.host, failure.retry) == ("memory", 2, "b", False)
    assert failure.line.startswith(
        "memory: rank 2 on b after step 12: the GPU's memory is full (torch.OutOfMemoryError"
    )
    assert "\n" not in failure.line


def test_of_two_causes_the_first_is_meant():
    ranks = (
        Rank(0, "a", 1, 3, ("ValueError: second",), order=2.0),
        Rank(1, "b", 1, 3, ("ValueError: first",), order=1.0),
    )
    assert classify(Evidence(ranks)).line == "unknown: rank 1 on b after step 3: ValueError: first"


def test_an_error_that_no_table_knows_is_still_the_cause():
    own = ("[rank1]: ValueError: a fault of rank 1", "terminate called without an active exception")
    ranks = (
        Rank(1, "b", 1, 3, own, order=2),
        Rank(0, "a", 1, 3, (GLOO_CLOSED, "[rank0]: RuntimeError: later"), order=1),
    )
    failure = classify(Evidence(ranks))
    assert failure.line == "unknown: rank 1 on b after step 3: ValueError: a fault of rank 1"
    chain = ("KeyError: 'x'", "ValueError: x is missing", *TORCHRUN)
    assert classify(Evidence((Rank(1, "b", 1, 3, chain),))).line.endswith("ValueError: x is missing")


def test_a_mark_that_stands_twice_is_no_part_of_the_error():
    """As two ranks on H200s had it."""
    known = "[rank1]: [rank1]: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    for line, kind in ((known, "memory"), ("[rank1]: [rank1]: ValueError: a fault of rank 1", "unknown")):
        found = classify(Evidence((Rank(1, "b", 1, 0, (line,)),)))
        assert found.kind == kind and "[rank1]" not in found.line and line[20:] in found.line


def test_preflight_names_the_hosts_to_leave_out():
    slow = "error: preflight: node 1, host b: 0.05 GB/s to any other host, 1 are usual; to be left out"
    other = "error: preflight: node 1, host b: torch is 2.10.0, elsewhere 2.11.0; to be left out"
    ranks = tuple(Rank(n, "abc"[n // 2], 2, 0, (slow, other), n) for n in range(6))
    failure = classify(Evidence(ranks))
    assert (failure.kind, failure.retry, failure.host, failure.blamed) == ("host", True, "b", ("b",))
    assert failure.line == f"host: {slow.removeprefix('error: ')} (and 1 more)"
    either = "error: preflight: node 0, host a: 1 GB/s to host b, 50 by the data sheet; one of the two"
    refused = classify(Evidence((Rank(0, "a", 2, 0, (either,)), Rank(1, "b", 2, 0, (either,)))))
    assert (refused.retry, refused.blamed) == (False, ())
    unclear = "error: corruption: node 0, host a, rank 0: step 4: differs from rank 1, and no other rank can decide: w"
    again = classify(Evidence((Rank(0, "a", 2, 0, (unclear,)), Rank(1, "b", 2, 0, (unclear,)))))
    assert (again.kind, again.retry, again.blamed) == ("host", True, ())


def test_the_trainers_own_fault_is_the_users():
    ranks = (Rank(1, "a", 2, 0, ("error: model.source: x is no model",), order=1), Rank(0, "a", 1, 0, (GLOO_CLOSED,)))
    failure = classify(Evidence(ranks))
    assert (failure.kind, failure.retry) == ("user", False)
    assert failure.line == "user: rank 1 on a: model.source: x is no model"


def test_sigkill_is_told_from_the_ooms():
    ranks = (Rank(0, "a", 1, 9, (GLOO_RESET,), order=1), Rank(1, "b", -signal.SIGKILL, 9, ("step 9/20",), order=2))
    killed = classify(Evidence(ranks))
    assert killed == Failure(
        "host", "host: rank 1 on b after step 9: killed by SIGKILL from outside the gang", True, "b", 1, 9
    )
    by_kernel = classify(Evidence(ranks, oom_kills={"a": 0, "b": 1}))
    assert (by_kernel.kind, by_kernel.host, by_kernel.retry) == ("memory", "b", False)


def test_a_broken_gpu_explains_what_its_rank_says():
    text = "RuntimeError: CUDA error: unspecified launch failure"
    evidence = Evidence((Rank(5, "b", 1, 40, (text,), order=1),), kernel={"a": (), "b": (XID.format(79),)})
    failure = classify(evidence)
    assert (failure.kind, failure.host, failure.blamed, failure.retry) == ("host", "b", ("b",), True)
    assert "fell off the bus" in failure.line and "Xid" in failure.line


def test_what_is_not_sure_of_the_kernel_comes_after_a_rank_s_own_words():
    lines = (XID.format(13), "[3.0] blk_update_request: I/O error, dev loop0, sector 0")
    told = Rank(5, "b", 1, 40, ("IndexError: index out of range in self",), order=1)
    assert classify(Evidence((told,), kernel={"b": lines})).kind == "data"
    silent = Rank(5, "b", -signal.SIGABRT, 40, (), order=1)
    failure = classify(Evidence((silent,), kernel={"b": lines[:1]}))
    assert (failure.kind, failure.host, failure.blamed) == ("unknown", "b", ())
    assert "a kernel made an illegal operation" in failure.line


def test_a_host_that_is_gone_explains_echoes():
    ranks = (Rank(0, "a", 1, 7, (GLOO_RESET,), order=1), Rank(1, "b", None, 7, ("step 7/20",)))
    failure = classify(Evidence(ranks, gone=("b",)))
    assert failure == Failure("host", "host: b no longer answers", True, "b", None, 7, ("b",))


def test_stopped_stalled_and_missing_are_told_apart():
    alive = [Rank(n, "ab"[n // 2], None, 7) for n in range(4)]
    stopped = classify(Evidence((*alive[:3], Rank(3, "b", None, 7, silent=True, state="T"))))
    assert (stopped.kind, stopped.rank) == ("hang", 3)
    assert stopped.line == "hang: rank 3 on b after step 7: stopped (SIGSTOP or a debugger)"
    behind = classify(Evidence((*alive[:3], Rank(3, "b", None, 6)), stalled=True))
    assert behind.line == "hang: rank 3 on b after step 6: completes no step, the others are at 7"
    assert classify(Evidence(tuple(alive), stalled=True)).line == "hang: no rank completes a step after 7"
    waited = [Rank(n, "ab"[n // 2], -signal.SIGABRT, 7, (WATCHDOG.format(n),), n) for n in (0, 1, 3)]
    late = classify(Evidence((*waited, Rank(2, "b", -signal.SIGTERM, 7, (), 9))))
    expected = "hang: ranks 0, 1, 3 waited for ALLREDUCE number 1580; rank 2 on b after step 7 did not join"
    assert (late.kind, late.line) == ("hang", expected)


def test_links_count_when_nothing_else_does():
    ranks = (Rank(0, "a", 1, 7, (NCCL_REMOTE,), order=1), Rank(4, "b", 1, 7, (RDMA,), order=2))
    failure = classify(Evidence(ranks))
    assert (failure.kind, failure.rank) == ("network", 4)
    assert "RDMA failed, to 172.36.143.59" in failure.line
    assert classify(Evidence((ranks[0],))).line.startswith("network: rank 0 on a after step 7 lost another rank")


def test_a_disk_that_is_full_everywhere_is_no_hosts_fault():
    ranks = (Rank(0, "a", 1, 7, ("OSError: [Errno 28] No space left on device",)),)
    assert classify(Evidence(ranks, free={"a": 0, "b": 0})).blamed == ()
    assert classify(Evidence(ranks, free={"a": 0, "b": 10**12})).blamed == ("a",)
    assert classify(Evidence(ranks)).blamed == ()


def test_a_host_whose_own_disk_is_full_is_left_out():
    full = "this host's own disk is full: 0.3 MB free at /tmp/gang-a/run"
    ranks = (Rank(0, "a", 1, 7, (GLOO_CLOSED,)), Rank(1, "b", 1, 7, (full, "OSError: No space left on device"), 1))
    found = classify(Evidence(ranks, free={"a": 0, "b": 0}))
    assert (found.kind, found.blamed) == ("host", ("b",)) and found.line.endswith(full)


def test_data_names_its_samples():
    run = load("tiny", ["train.global_batch=16", "paths.data=runs/tiny/data"])
    failure = classify(Evidence((Rank(0, "a", 1, 3, ("IndexError: index out of range in self",)),)), run)
    assert failure.kind == "data" and "step 4 reads samples 48 to 63 of runs/tiny/data" in failure.line


def test_preemption():
    line = "slurmstepd: error: *** JOB 42 ON node7 CANCELLED AT 2026-11-21T10:00:00 DUE TO PREEMPTION ***"
    ranks = (Rank(0, "node7", -signal.SIGTERM, 5), Rank(1, "node8", -signal.SIGTERM, 5))
    failure = classify(Evidence(ranks, engine=(line,)))
    assert (failure.kind, failure.retry, failure.host, failure.blamed) == ("preempted", True, "node7", ())
    assert classify(Evidence(ranks)).kind == "preempted"


@pytest.mark.parametrize("state", ["preempted", "stopped"])
def test_why_a_host_was_told_to_end_is_the_schedulers_to_say(state):
    signs = [Sign(k, 9, 5, "training", 0.0, 0.0, "", silent=False, stalled=False) for k in range(2)]
    nodes = {k: Member("x", f"node{k + 7}", state, reason="told to end", ranks=(signs[k],)) for k in range(2)}
    lookout: Any = SimpleNamespace(order_of_failure=lambda k: k, nodes=nodes)

    def verdict(*engine: str) -> Failure:
        return of_attempt(load("tiny"), lookout, {0: "node7", 1: "node8"}, set(), engine)

    unsaid = verdict("slurmstepd: error: *** STEP 42.0 ON node8 CANCELLED AT 2026-11-21T10:00:00 ***")
    assert unsaid.kind == ("preempted" if state == "preempted" else "host") and unsaid.blamed == ()
    lost = verdict("slurmstepd: error: *** JOB 42 ON node8 CANCELLED AT 2026-11-21T10:00:00 DUE TO NODE FAILURE ***")
    assert (lost.kind, lost.host, lost.blamed, lost.step) == ("host", "node8", ("node8",), 5)
    late = verdict("slurmstepd: error: *** JOB 42 ON node7 CANCELLED AT 2026-11-21T10:00:00 DUE TO TIME LIMIT ***")
    assert late.kind == "preempted" and "time limit" in late.line


def test_nothing_at_all_is_said_so():
    assert classify(Evidence()).line == "unknown: the gang ended, and no rank reports the cause"
    assert (
        classify(Evidence((Rank(3, "a", 7),))).line == "unknown: rank 3 on a: ended with code 7 and without a message"
    )


def test_every_line_fits_one_screen():
    failure = classify(Evidence((Rank(0, "a", 1, 0, ("ValueError: " + "x" * 5000,)),)))
    assert len(failure.line) < 400


def test_the_table_of_xids_is_whole():
    assert all(means and isinstance(blames, bool) for means, blames in XIDS.values())
