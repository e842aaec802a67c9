"""Verdict on hosts: find the hosts that are unfit for a gang, from pre-flight's measurements. Pure functions of facts.

    misfits(hosts, ranks, pairs, expected) -> list[Misfit]

A figure is compared with the data sheet's figure, if it is known (conf/planner/hardware.py), and with the figures of
other hosts. Each host is judged by its best pair: a host is slow if it is slow with every other host. With three or
more hosts this identifies a slow host. With two hosts it is only known that one of them is slow. Then no host is left
out, and the gang is refused.

Versions and configuration are compared with the most frequent value; if several are equally frequent, with the first.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

GB = 1e9
# A figure below this share of the others' is slow. GPUs have separate links and adapters, and differ by a few percent.
# Processes without GPUs share cores with other programs, so only the links between hosts are judged.
AGAINST_OTHERS = {"gpu": 0.75, "cpu": 0.2}
AGAINST_SHEET = 0.5  # share of the data sheet's figure: NCCL reaches 0.8 with large messages, 0.6 in an all-to-all
DISK_SHARE, DISK_ENOUGH = 0.25, 200e6  # share of the others' speed; bytes/s that are enough in any case
ROOM = {"gpu": 2 * GB, "cpu": 0}  # free disk space that a run needs; tiny models need little
SHM = 64e6  # bytes of /dev/shm: the default of containers, with which NCCL and data loaders fail
TAKEN = 2 * GB  # limit of a GPU's memory that others use; one context needs 0.5 GB
LEFT_OUT = "; to be left out"
CLOCK = 0.6  # share of the highest clock that a GPU must reach under load


@dataclass(frozen=True)
class Misfit:
    host: str
    what: str  # text of the line after the host's name
    leave_out: bool = True
    rank: int | None = None
    measured: float | None = None
    expected: float | None = None

    @property
    def line(self) -> str:
        rank = f", rank {self.rank}" if self.rank is not None else ""
        return f"host {self.host}{rank}: {self.what}"

    def report(self, node: int, check: str = "preflight") -> str:
        """Line for the process that started the ranks, with the node and whether to leave it out."""
        return f"{check}: node {node}, {self.line}{LEFT_OUT if self.leave_out else ''}"


Pairs = Mapping[tuple[str, str], Sequence[float]]  # bytes/s between two hosts, by local rank


@dataclass(frozen=True)
class Expected:
    """Expected bytes/s per GPU and direction, according to the data sheets; None on a CPU."""

    network: float | None = None
    link: float | None = None
    adapters: int | None = None  # RDMA devices per host


def misfits(hosts: Sequence[Mapping], ranks: Sequence[Mapping], pairs: Pairs, expected: Expected) -> list[Misfit]:
    """Find the hosts that do not fit.

    `hosts` are health.of_host's facts, with a unique "host". `ranks` have host, rank, speed, link, gpu
    (health.of_gpu's) and taken.
    """
    kind = "gpu" if any(rank.get("gpu") for rank in ranks) else "cpu"
    bound = AGAINST_OTHERS[kind]
    result = [*_versions(hosts, ranks), *_disks(hosts, ROOM[kind]), *_memory(hosts)]
    result += _adapters(hosts, expected.adapters)
    if kind == "cpu":
        return result + slow_hosts(pairs, bound, None)
    for rank in ranks:
        result += _gpu(rank)
    result += _slow_ranks(ranks, "speed", bound, None, "computes", "TFLOP/s", 1e12)
    result += _slow_ranks(ranks, "link", bound, expected.link, "reaches the others of its host with", "GB/s", GB)
    result += slow_hosts(pairs, bound, expected.network)
    return result


def _versions(hosts: Sequence[Mapping], ranks: Sequence[Mapping]) -> Iterable[Misfit]:
    of_gpus: dict[str, dict[str, str]] = {}
    for rank in ranks:
        gpu = rank.get("gpu") or {}
        of_gpus[rank["host"]] = {"the driver": gpu.get("driver", "none"), "the GPU": gpu.get("name", "none")}
    facts = {host["host"]: {**host["versions"], **of_gpus.get(host["host"], {})} for host in hosts}
    for name in sorted({name for versions in facts.values() for name in versions}):
        usual = Counter(versions.get(name, "none") for versions in facts.values()).most_common(1)[0][0]
        for host, versions in facts.items():
            if (has := versions.get(name, "none")) != usual:
                yield Misfit(host, f"{name} is {has}, elsewhere {usual}")


def _disks(hosts: Sequence[Mapping], room: float) -> Iterable[Misfit]:
    disks = {host["host"]: host["disk"] for host in hosts}
    whole = {host: disk for host, disk in disks.items() if "error" not in disk}
    for host, disk in disks.items():
        if "error" in disk:
            yield Misfit(host, f"{disk['folder']}: {disk['error']}")
        elif disk["free"] < room:
            what = f"{disk['folder']}: {disk['free'] / GB:.1f} GB are free, {room / GB:.0f} are needed"
            yield Misfit(host, what, measured=disk["free"], expected=room)
    for way in ("write", "read"):
        usual = median_high([disk[way] for disk in whole.values()]) if len(whole) > 2 else 0
        for host, disk in whole.items():
            if disk[way] < min(DISK_SHARE * usual, DISK_ENOUGH):
                what = f"{disk['folder']}: {way}s {disk[way] / 1e6:.0f} MB/s, the others {usual / 1e6:.0f}"
                yield Misfit(host, what, measured=disk[way], expected=usual)


def _memory(hosts: Sequence[Mapping]) -> Iterable[Misfit]:
    usual = median_high([host["memory_available"] for host in hosts])
    for host in hosts:
        if host["memory_available"] < usual / 2:
            what = f"{host['memory_available'] / GB:.0f} GB of memory are free, elsewhere {usual / GB:.0f}"
            yield Misfit(host["host"], what, measured=host["memory_available"], expected=usual)
        if host.get("shm_free", SHM + 1) <= SHM:
            what = f"/dev/shm has {host['shm_free'] / 1e6:.0f} MB free; give the container more"
            yield Misfit(host["host"], what, measured=host["shm_free"], expected=SHM)


def _adapters(hosts: Sequence[Mapping], expected: int | None) -> Iterable[Misfit]:
    active = {host["host"]: sum("ACTIVE" in state for state in host["adapters"].values()) for host in hosts}
    usual = expected or max(active.values(), default=0)
    for host, count in active.items():
        if count < usual:
            what = f"{count} of {usual} RDMA adapters are active"
            yield Misfit(host, what, measured=count, expected=usual)


def _gpu(rank: Mapping) -> Iterable[Misfit]:
    gpu, host, number = rank.get("gpu") or {}, rank["host"], rank["rank"]
    if gpu.get("ecc"):
        yield Misfit(host, f"GPU memory has {gpu['ecc']} uncorrected bit errors", rank=number)
    _corrected, _uncorrected, pending, failed = gpu.get("rows") or (0, 0, 0, 0)
    if pending or failed:
        yield Misfit(host, f"a row of GPU memory {'could not' if failed else 'has still to'} be replaced", rank=number)
    if gpu.get("slowed"):
        what = f"the GPU runs slower: {', '.join(gpu['slowed'])}, {gpu.get('temperature', '?')} degrees"
        yield Misfit(host, what, rank=number)
    elif gpu.get("clock_max") and gpu.get("clock", 0) < CLOCK * gpu["clock_max"]:
        what = f"the GPU runs at {gpu['clock']} of {gpu['clock_max']} MHz under load"
        yield Misfit(host, what, True, number, gpu["clock"], gpu["clock_max"])
    links = gpu.get("links") or {"up": 0, "there": 0}
    if 0 < links["up"] < links["there"]:
        yield Misfit(
            host, f"{links['up']} of {links['there']} NVLinks are up", True, number, links["up"], links["there"]
        )
    now, most = gpu.get("pcie") or (0, 0)
    if now < most:
        yield Misfit(host, f"PCIe has {now} of {most} lanes", True, number, now, most)
    if rank.get("taken", 0) > TAKEN:
        what = f"another process has {rank['taken'] / GB:.1f} GB of the GPU's memory"
        yield Misfit(host, what, True, number, rank["taken"], TAKEN)


def _slow_ranks(
    ranks: Sequence[Mapping], key: str, bound: float, sheet: float | None, does: str, unit: str, scale: float
) -> Iterable[Misfit]:
    values = {rank["rank"]: rank[key] for rank in ranks if rank.get(key)}
    if not values:
        return
    usual, hosts = median_high(values.values()), {rank["rank"]: rank["host"] for rank in ranks}
    limit, name = max((bound * usual, "are usual"), (AGAINST_SHEET * (sheet or 0), "by the data sheet"))
    for rank, value in values.items():
        if value < limit:
            expected = usual if name == "are usual" else sheet or 0
            what = f"{does} {value / scale:.3g} {unit}, {expected / scale:.3g} {name}"
            yield Misfit(hosts[rank], what, True, rank, value, expected)


def slow_hosts(pairs: Pairs, bound: float, sheet: float | None) -> list[Misfit]:
    """Judge each host by its slowest rail. The speed of a rail is the speed of the host's best pair on it."""
    hosts = sorted({host for pair in pairs for host in pair})
    if not hosts:
        return []
    rails = range(len(next(iter(pairs.values()))))
    best = {
        (host, rail): max(values[rail] for pair, values in pairs.items() if host in pair)
        for host in hosts
        for rail in rails
    }
    usual = median_high(best.values())
    limit = max(bound * usual, AGAINST_SHEET * (sheet or 0))
    result, slow = [], set()
    for host in hosts:
        slow_rails = [rail for rail in rails if best[host, rail] < limit]
        if not slow_rails:
            continue
        slow.add(host)
        rail = min(slow_rails, key=lambda rail: best[host, rail])
        value, expected = best[host, rail], max(usual, sheet or 0)
        place = f" on rail {rail}" if len(slow_rails) < len(rails) else ""
        if len(hosts) == 2:
            other = next(name for name in hosts if name != host)
            by_sheet = f"{expected / GB:.3g} by the data sheet; one of the two"
            what = f"{value / GB:.3g} GB/s to host {other}{place}, {by_sheet}"
        else:
            what = f"{value / GB:.3g} GB/s to any other host{place}, {expected / GB:.3g} are usual"
        result.append(Misfit(host, what, len(hosts) > 2, None, value, expected))
    for (a, b), values in sorted(pairs.items()):
        if not {a, b} & slow and min(values) < bound * usual:
            what = (
                f"{min(values) / GB:.3g} GB/s to host {b}, though both are faster with others ({usual / GB:.3g} GB/s)"
            )
            result.append(Misfit(a, what, False, None, min(values), usual))
    return result


def rounds(hosts: int, most: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of hosts. The pairs of a round are measured in parallel; each host is in one of them.

    All pairs take hosts - 1 rounds; at most `most` rounds are returned.
    """
    places = list(range(hosts)) + ([-1] if hosts % 2 else [])
    result: list[list[tuple[int, int]]] = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        result.append([(min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0])
        places = [places[0], places[-1], *places[1:-1]]
    step = max(1, -(-len(result) // most))
    return result[::step]


def unique(names: Sequence[str]) -> list[str]:
    """Make names unique. Containers and namespaces of a host may have the same name."""
    return [name if names.count(name) == 1 else f"{name}/{node}" for node, name in enumerate(names)]
