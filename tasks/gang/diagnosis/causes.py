"""Table of error texts of failed processes and their meanings, the most reliable first.

    read(lines) -> Cause | None        the most reliable cause in these lines

Most lines of a failed gang are echoes: one of N ranks has a cause, and the others report that they lost it. The
strength of a cause distinguishes these. The order in which ranks died matters only between causes of equal strength:

    OWN      a failure of this process or its host
    LINK     a failed connection; perhaps the consequence of another process's death
    ECHO     certainly the consequence of another failure: a peer closed, a watchdog ran out, torchrun stops the rest

Kinds: user, memory, data, host, network, storage, preempted, hang, unknown; tasks/gang/diagnosis/classify.py has the
consequence of each. Texts are those of torch 2.11, NCCL 2.28, CUDA 13, Linux 6, Slurm 24 and Kubernetes 1.33 (tests
have real ones). Not covered: texts in other languages than English, errors of AMD's libraries.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["user", "memory", "data", "host", "network", "storage", "preempted", "hang", "unknown"]
OWN, LINK, ECHO = 2, 1, 0


@dataclass(frozen=True)
class Cause:
    kind: Kind
    says: str  # the line of the log
    means: str  # its meaning; "" if the line itself is clear
    strength: int = OWN
    retry: bool = True
    blames: bool = False  # later attempts exclude its host
    peer: str = ""  # address of the other end, if the line names one


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    kind: Kind
    means: str
    strength: int = OWN
    retry: bool = True
    blames: bool = False


def _rule(pattern: str, kind: Kind, means: str = "", **rest) -> Rule:
    return Rule(re.compile(pattern), kind, means, **rest)


# NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors), by its column "immediate action". True excludes the host,
# because the GPU needs a reset, a reboot or a technician; for the others it is enough to start the program again.
XIDS = {
    13: ("a kernel made an illegal operation", False),
    31: ("a kernel accessed memory of another program", False),
    43: ("the GPU stopped this program", False),
    48: ("two bits of GPU memory flipped", True),
    63: ("a bad row of GPU memory is being replaced, which needs a reset", True),
    64: ("a bad row of GPU memory could not be replaced", True),
    74: ("NVLink error", True),
    79: ("the GPU fell off the bus", True),
    92: ("many bit errors in GPU memory", True),
    94: ("a bit error in GPU memory, contained: this program alone has lost data", False),
    95: ("a bit error in GPU memory, not contained", True),
    109: ("the GPU did not switch between programs in time", True),
    119: ("the GPU's own processor does not answer", True),
    120: ("the GPU's own processor failed", True),
    140: ("bit errors that the GPU could not correct", True),
    149: ("NVLink failed", True),
    154: ("the GPU asks to be reset or replaced", True),
}
XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
# The driver writes Xid 45 for each program that it ends because of another Xid.
CONSEQUENCE = 45
PEER = re.compile(r"(?:peer|from|remote peer|with)? ?\[?((?:\d{1,3}\.){3}\d{1,3}|[0-9a-f:]*:[0-9a-f:]+)[\]<]")

RULES = (
    # The host, as reported by its kernel or its scheduler
    _rule(r"uncorrectable ECC error", "host", "GPU memory is broken", blames=True),
    _rule(r"GPU has fallen off the bus|fallen off the bus and is not responding", "host", XIDS[79][0], blames=True),
    _rule(r"uncorrectable NVLink error", "host", XIDS[74][0], blames=True),
    _rule(r"CUDA error: (?:an )?(?:hardware stack error|unknown error)", "host", "the GPU failed", blames=True),
    _rule(r"No CUDA GPUs are available|CUDA driver initialization failed|system not yet initialized", "host",
          "the driver finds no GPU, or nvidia-fabricmanager does not run", blames=True),
    _rule(r"DUE TO NODE FAILURE|NodeLost|node .* is not ready", "host", "the scheduler has lost the host", blames=True),
    _rule(r"DUE TO PREEMPTION|[Pp]reempt(?:ed|ing)\b|DisruptionTarget|TerminationByKubernetes|spot .*interruption",
          "preempted", "the scheduler took the host back"),
    _rule(r"DUE TO TIME LIMIT", "preempted", "the time limit of the job is over"),
    _rule(r"[Ee]victed.*(?:ephemeral-storage|disk)|DiskPressure", "storage", "the host's disk is full", blames=True),
    _rule(r"this host's own disk is full", "host", "", blames=True),  # tasks/gang/ranks.py
    # Memory: of the GPU, of the host, of /dev/shm
    _rule(r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|torch\.OutOfMemoryError", "memory",
          "the GPU's memory is full", retry=False),
    _rule(r"NCCL.*(?:Cuda failure.*'out of memory'|failed to allocate.*device memory)", "memory",
          "no GPU memory is left for NCCL's buffers", retry=False),
    _rule(r"oom-kill:|Out of memory: Killed process|Memory cgroup out of memory|OOMKilled|oom_kill event", "memory",
          "the host's memory is full: the kernel killed a process", retry=False),
    _rule(r"[Ee]victed.*memory|MemoryPressure", "memory", "the host's memory is full", retry=False),
    _rule(r"MemoryError|Cannot allocate memory|DefaultCPUAllocator: (?:can't|not enough) .*memory", "memory",
          "the host's memory is full", retry=False),
    _rule(r"out of shared memory|unable to (?:allocate|mmap|open) shared memory|No space left on device.*/dev/shm|"
          r"/dev/shm.*No space left on device", "memory",
          "/dev/shm is full: give the container a larger one", retry=False),
    # Storage
    _rule(r"No space left on device|Disk quota exceeded|\d MB are free there|ENOSPC|EDQUOT", "storage",
          "the disk is full", blames=True),
    _rule(r"Stale file handle|Input/output error|Transport endpoint is not connected|nfs: server \S+ not responding|"
          r"blk_update_request: I/O error|EXT4-fs error|XFS .*(?:corruption|shutting down)", "storage",
          "the file system does not answer", blames=True),
    _rule(r"Read-only file system", "storage", "the disk is read-only", blames=True),
    _rule(r"a checkpoint could not be written|EndpointConnectionError|SlowDown|ServiceUnavailable|"
          r"ConnectTimeoutError: Connect timeout on endpoint", "storage", "the storage does not answer"),
    _rule(r"not a complete checkpoint|invalid magic number|PytorchStreamReader failed|checkpoint .*corrupt",
          "storage", "a checkpoint cannot be read"),
    # Data
    _rule(r"index out of range in self|srcIndex < srcSelectDimSize|vectorized_gather_kernel.*index out of bounds|"
          r"does not fit the model", "data", "a token id is not in the vocabulary", retry=False),
    _rule(r"Caught \w+ in DataLoader worker process|(?:error|failed).*(?:at|in) sample \d+|"
          r"since it was prepared|trainer\.prepare writes it (anew|again)|not what trainer\.prepare writes", "data",
          "", retry=False),
    _rule(r"\.jsonl:\d+: ", "data", "", retry=False),
    # The user: errors that would occur again
    _rule(r"nothing is learned after", "user", "", retry=False),
    _rule(r"ModuleNotFoundError|ImportError: cannot import|undefined symbol", "user",
          "the environment of this host lacks something", retry=False),
    _rule(r"set to \S+, but expected \S+ for attention backend|requires? .*CUDA_DEVICE_MAX_CONNECTIONS", "user",
          "the environment contradicts the configuration", retry=False),
    _rule(r"Error\(s\) in loading state_dict|size mismatch for |Missing key in (?:checkpoint|state_dict)|"
          r"[Gg]lobal shape mismatch", "user", "the checkpoint is of another model or layout", retry=False),
    _rule(r"ncclInvalidUsage|Duplicate GPU detected", "user", "two ranks use one GPU", retry=False),
    _rule(r"error: (?:conf|layout|data|model|train|paths|adapter|moe|optimizer|checkpoint)[\w./-]*: ", "user", "",
          retry=False),
    # Numbers: the first time, a broken GPU and a too high learning rate look alike
    _rule(r"found NaN in local (?:grad|forward)|Unexpected result (?:nan|inf)|loss is (?:nan|inf)", "unknown",
          "the loss or a gradient is not a number"),
    _rule(r"device-side assert triggered", "data", "an index on the GPU was out of bounds", retry=False),
    _rule(r"CUDA error: an illegal memory access|CUDA error: misaligned address|unspecified launch failure", "unknown",
          "a kernel failed"),
    # Failed connections
    _rule(r"NET/IB ?:.* Got (?:completion|async event).*(?:status=|error|event)|NET/IB.*(?:port error|link down)",
          "network", "RDMA failed", strength=LINK),
    _rule(r"NET/OFI.*(?:Request completed with error|Unreachable remote|RC: -)", "network", "EFA failed",
          strength=LINK),
    _rule(r"No route to host|Network is (?:unreachable|down)|Name or service not known|"
          r"Temporary failure in name resolution", "network", "a host cannot be reached", strength=LINK),
    _rule(r"client socket has (?:timed out|failed)|The server socket has failed|RendezvousTimeoutError|"
          r"RendezvousConnectionError|connectFullMesh failed", "network", "ranks did not find each other",
          strength=LINK),
    _rule(r"ncclSystemError|NET/Plugin.*(?:Could not find|failed)|Failed to initialize any NET plugin|"
          r"no socket interface found", "network", "NCCL cannot use the network", strength=LINK),
    _rule(r"Connection timed out|Software caused connection abort", "network", "a connection failed", strength=LINK),
    # Echoes
    _rule(r"Watchdog caught collective operation timeout|ran for \d+ milliseconds before timing out|"
          r"Timed out waiting \d+ms for (?:recv|send) operation|Application timeout caused pair closure|"
          r"watchdog got stuck|monitored_?[Bb]arrier", "hang", "waited for another rank", strength=ECHO),
    _rule(r"ncclRemoteError|remote process exited|Connection (?:closed by|reset by) (?:remote )?peer|Broken pipe|"
          r"Connection refused|pair\.cc:\d+\]|recvValue failed|failed to recv, got 0 bytes|Socket Timeout|"
          r"ncclInternalError|NCCL communicator was aborted|DistBackendError|DistNetworkError|remote_error", "network",
          "lost another rank", strength=ECHO),
    _rule(r"ChildFailedError|SignalException|Signal 15 \(SIGTERM\)|Sending process \d+ closing signal|"
          r"terminate called", "unknown", "stopped with the others", strength=ECHO),
)  # fmt: skip


def read(lines: Iterable[str]) -> Cause | None:
    """The most reliable cause in the lines, and the first of equal ones, as later lines are mostly its consequences."""
    best: Cause | None = None
    for line in lines:
        cause = _of(line.strip())
        if cause and (best is None or cause.strength > best.strength):
            best = cause
    return best


def _of(line: str) -> Cause | None:
    if xid := XID.search(line):
        number = int(xid[1])
        if number == CONSEQUENCE:
            return None
        means, blames = XIDS.get(number, (f"the driver reports Xid {number}", False))
        kind: Kind = "host" if blames or number == 94 else "unknown"
        return Cause(kind, line, means, blames=blames)
    for rule in RULES:
        if rule.pattern.search(line):
            peer = PEER.search(line) if rule.strength < OWN else None
            return Cause(rule.kind, line, rule.means, rule.strength, rule.retry, rule.blames, peer[1] if peer else "")
    return None
