"""Verdict on hosts: which do not fit a gang, by what pre-flight has measured on all. Pure: facts in, faults out.

    misfits(hosts, ranks, pairs, expected) -> list[Fault]

A figure is held against the makers' where they are known (conf/planner/hardware.py), else against the other hosts': a
host is slow when it is slow against everybody, so each is judged by its best pair, and three hosts of which one is slow
already tell which. Two hosts can only tell that one of them is: neither is left out, and the gang is refused.

Versions and configuration are held against what most hosts have, or the first of as many.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

GB = 1e9
# A figure below this share of the others' counts as slow. GPUs have their own links and adapters, and differ by a few
# percent; processes without them share cores with whatever else runs: of those only links between hosts are judged.
AGAINST_OTHERS = {"gpu": 0.75, "cpu": 0.2}
AGAINST_SHEET = 0.5  # of the data sheet's figure: NCCL gets 0.8 of it with large messages, 0.6 in an all-to-all
DISK_SHARE, DISK_ENOUGH = 0.25, 200e6  # of the others' speed; bytes/s that are enough however fast others are
ROOM = {"gpu": 2 * GB, "cpu": 0}  # of disk, under which a run is not begun; tiny models need little
SHM = 64e6  # bytes of /dev/shm: the default of containers, in which NCCL and data loaders fail
TAKEN = 2 * GB  # of a GPU's memory by others; a context of ours is 0.5 GB
LEFT_OUT = "; to be left out"
CLOCK = 0.6  # of the highest clock, under load


@dataclass(frozen=True)
class Misfit:
    host: str
    what: str  # after the host's name, a line
    leave_out: bool = True
    rank: int | None = None
    measured: float | None = None
    expected: float | None = None

    @property
    def line(self) -> str:
        rank = f", rank {self.rank}" if self.rank is not None else ""
        return f"host {self.host}{rank}: {self.what}"

    def told(self, node: int) -> str:
        """Line for the process that started the ranks: which node, and whether it is to be left out."""
        return f"preflight: node {node}, {self.line}{LEFT_OUT if self.leave_out else ''}"


Pairs = Mapping[tuple[str, str], Sequence[float]]  # bytes/s between two hosts, by local rank


@dataclass(frozen=True)
class Expected:
    """Expected bytes/s per GPU and direction, by the data sheets; None on a CPU."""

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
    found = [*_versions(hosts, ranks), *_disks(hosts, ROOM[kind]), *_memory(hosts)]
    found += _adapters(hosts, expected.adapters)
    if kind == "cpu":
        return found + slow_hosts(pairs, bound, None)
    for rank in ranks:
        found += _gpu(rank)
    found += _slow_ranks(ranks, "speed", bound, None, "computes", "TFLOP/s", 1e12)
    found += _slow_ranks(ranks, "link", bound, expected.link, "reaches the others of its host with", "GB/s", GB)
    found += slow_hosts(pairs, bound, expected.network)
    return found


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
            what = f"{disk['folder']}: {disk['free'] / GB:.1f} GB are free, {room / GB:.0f} are wanted"
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


def _adapters(hosts: Sequence[Mapping], wanted: int | None) -> Iterable[Misfit]:
    active = {host["host"]: sum("ACTIVE" in state for state in host["adapters"].values()) for host in hosts}
    usual = wanted or max(active.values(), default=0)
    for host, count in active.items():
        if count < usual:
            what = f"{count} of {usual} RDMA adapters are active"
            yield Misfit(host, what, measured=count, expected=usual)


def _gpu(rank: Mapping) -> Iterable[Misfit]:
    gpu, host, number = rank.get("gpu") or {}, rank["host"], rank["rank"]
    if gpu.get("ecc"):
        yield Misfit(host, f"{gpu['ecc']} bit errors of GPU memory were not corrected", rank=number)
    _corrected, _uncorrected, pending, failed = gpu.get("rows") or (0, 0, 0, 0)
    if pending or failed:
        yield Misfit(host, f"a row of GPU memory {'could not' if failed else 'is yet to'} be replaced", rank=number)
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
            held = usual if name == "are usual" else sheet or 0
            what = f"{does} {value / scale:.3g} {unit}, {held / scale:.3g} {name}"
            yield Misfit(hosts[rank], what, True, rank, value, held)


def slow_hosts(pairs: Pairs, bound: float, sheet: float | None) -> list[Misfit]:
    """Judge each host by the best that any pair of it reaches on a rail; the slowest rail of a host counts."""
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
    found, slow = [], set()
    for host in hosts:
        slow_rails = [rail for rail in rails if best[host, rail] < limit]
        if not slow_rails:
            continue
        slow.add(host)
        rail = min(slow_rails, key=lambda rail: best[host, rail])
        value, held = best[host, rail], max(usual, sheet or 0)
        which = f" on rail {rail}" if len(slow_rails) < len(rails) else ""
        if len(hosts) == 2:
            other = next(one for one in hosts if one != host)
            what = f"{value / GB:.3g} GB/s to host {other}{which}, {held / GB:.3g} by the data sheet; one of the two"
        else:
            what = f"{value / GB:.3g} GB/s to any other host{which}, {held / GB:.3g} are usual"
        found.append(Misfit(host, what, len(hosts) > 2, None, value, held))
    for (a, b), values in sorted(pairs.items()):
        if not {a, b} & slow and min(values) < bound * usual:
            what = (
                f"{min(values) / GB:.3g} GB/s to host {b}, though both are faster with others ({usual / GB:.3g} GB/s)"
            )
            found.append(Misfit(a, what, False, None, min(values), usual))
    return found


def rounds(hosts: int, most: int) -> list[list[tuple[int, int]]]:
    """Pairs of hosts that meet at once, each host with one other.

    All pairs take hosts - 1 rounds; `most` of them are kept.
    """
    places = list(range(hosts)) + ([-1] if hosts % 2 else [])
    found: list[list[tuple[int, int]]] = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in met if min(a, b) >= 0])
        places = [places[0], places[-1], *places[1:-1]]
    step = max(1, -(-len(found) // most))
    return found[::step]


def unique(names: Sequence[str]) -> list[str]:
    """Make names unique. Containers and namespaces of one host may bear one name."""
    return [name if names.count(name) == 1 else f"{name}/{node}" for node, name in enumerate(names)]


def as_dict(misfit: Misfit) -> dict[str, Any]:
    return {**vars(misfit), "line": misfit.line}
