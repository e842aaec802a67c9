"""Check on all ranks, within a minute, that these hosts are fit to train together, before the model is loaded.

    torchrun ... -m trainer.preflight RESOLVED.yaml          on every host, like trainer.train
    python -m trainer.preflight CONF [key=value ...]         on one host

In a gang, trainer.train runs the same check first, unless gang.preflight is false.

The check measures the bandwidth within and between hosts and the speed of GPUs and disks, and reads the health of GPUs
and the versions (trainer/hosts/health.py). trainer/hosts/host_verdict.py decides which hosts are unfit. Rank 0 writes
<paths.logs>/preflight.json: ok, the lines, hosts to leave out (by name, and by number as nodes), every measurement.
Exit code 0: fit; 2: unfit, with one line per fault.

Hosts are tested in pairs, in rounds of parallel pairs; each rank exchanges with the rank of the same number, its rail.
A slow host slows all others, and only pairs show which host it is. Without GPUs the same check runs over gloo, with
smaller messages. Not covered: hosts that cannot be reached at all (the starter of a gang notices them first), SHARP,
the storage of checkpoints beyond one file per host.
"""

# pyright: reportArgumentType=false

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

from conf.network import PRESETS
from conf.planner.hardware import by_device
from conf.schema.run import Run
from contract.faults import Fault
from trainer.hosts import products
from trainer.hosts.health import of_gpu, of_host, used_by_others
from trainer.hosts.host_verdict import Expected, misfits, rounds, unique
from trainer.patches import store_address
from trainer.startup import entry
from trainer.startup.console import say
from trainer.startup.device import has_gpu
from trainer.weights import atomic_folder

WITHIN = 60.0  # seconds that a rank waits for another
ROUNDS = 15  # of pairs: all pairs of 16 hosts; with more hosts, each meets 15 others
# Bytes of a message: NCCL needs 100 MB for its full speed; over gloo 8 MB take 10 ms
REDUCED, SWAPPED, SPREAD = {"gpu": 256e6, "cpu": 8e6}, {"gpu": 64e6, "cpu": 8e6}, {"gpu": 64e6, "cpu": 4e6}
WRITTEN = {"gpu": 1e9, "cpu": 16e6}  # bytes per host


def main(run: Run) -> None:
    started = time.monotonic()
    verdict = measure(run)
    verdict["seconds"] = round(time.monotonic() - started, 1)
    if os.environ["RANK"] == "0":
        path = Path(run.paths.logs) / "preflight.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(verdict, indent=1) + "\n")
        say(f"preflight: {summary(verdict)}")
    if verdict["lines"]:
        raise Fault("\n".join(verdict["lines"]))


def measure(run: Run) -> dict[str, Any]:
    """Measure everything; every rank returns the same result."""
    import torch
    from torch import distributed
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    kind = "gpu" if has_gpu() else "cpu"
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if kind == "gpu" else torch.device("cpu")
    rank: dict[str, Any] = {"rank": int(os.environ["RANK"])}
    if kind == "gpu":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        rank["taken"] = used_by_others(local)
    store_address.install()
    within = datetime.timedelta(seconds=WITHIN)
    backend = "cpu:gloo,cuda:nccl" if kind == "gpu" else "gloo"
    # A separate prefix: training uses the same store afterwards, and must not see these keys.
    store, number, world = next(rendezvous("env://", timeout=within))
    store, gpu = PrefixStore("preflight", store), device if kind == "gpu" else None
    distributed.init_process_group(backend, store=store, rank=number, world_size=world, timeout=within, device_id=gpu)
    try:
        return _measure(run, kind, device, rank)
    finally:
        distributed.destroy_process_group()
        if kind == "gpu":
            torch.cuda.empty_cache()


def _measure(run: Run, kind: str, device, rank: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch import distributed

    world, per_host = distributed.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    node, local = divmod(distributed.get_rank(), per_host)
    groups = [distributed.new_group(range(n, n + per_host)) for n in range(0, world, per_host)]
    of_this_host = of_host(run, int(WRITTEN[kind])) if local == 0 else None
    distributed.barrier(group=groups[node])
    rank["speed"] = products.speed(device, torch.bfloat16 if kind == "gpu" else torch.float32)
    rank["gpu"] = of_gpu(local) if kind == "gpu" else {}

    def tensor(size: float):
        return torch.ones(int(size) // 4, device=device)

    data = tensor(REDUCED[kind])
    if per_host > 1:
        rank["link"] = _bus(_timed(device, lambda: distributed.all_reduce(data, group=groups[node])), data, per_host)
    if world > 1:
        rank["all_reduce"] = _bus(_timed(device, lambda: distributed.all_reduce(data)), data, world)
        sent = tensor(SPREAD[kind] // world * world)
        sent = sent[: len(sent) // world * world]
        got = torch.empty_like(sent)
        seconds = _timed(device, lambda: distributed.all_to_all_single(got, sent))
        rank["all_to_all"] = sent.nbytes * (world - 1) / world / seconds
    rank["pairs"] = _pairs(device, tensor(SWAPPED[kind]), node, local, per_host, world)
    return _judged(run, atomic_folder.gather((rank, of_this_host)), per_host)


def _timed(device, operation) -> float:
    """Return the seconds of an operation that all ranks begin together."""
    import torch

    return products.seconds(device, operation, lambda: torch.distributed.all_reduce(torch.zeros(1)))


def _bus(seconds: float, data, ranks: int) -> float:
    """Return the bytes/s that each rank sends in an all-reduce, counted like NCCL's tests."""
    return 2 * (ranks - 1) / ranks * data.nbytes / seconds


def _pairs(device, sent, node: int, local: int, per_host: int, world: int) -> list[tuple[int, float]]:
    """Return the rounds of this rank: partner and bytes/s in each direction."""
    import torch
    from torch import distributed

    received, results = torch.empty_like(sent), []
    for pairs in rounds(world // per_host, ROUNDS):
        partner = next((a + b - node for a, b in pairs if node in (a, b)), None)

        def swap(partner=partner) -> None:
            if partner is None:
                return
            other = partner * per_host + local
            both = [
                distributed.P2POp(distributed.isend, sent, other),
                distributed.P2POp(distributed.irecv, received, other),
            ]
            for work in distributed.batch_isend_irecv(both):
                work.wait()

        seconds = _timed(device, swap)
        if partner is not None:
            results.append((partner, sent.nbytes / seconds))
    return results


def _judged(run: Run, of_ranks: list[tuple[dict, dict | None]], per_host: int) -> dict[str, Any]:
    ranks, hosts = [rank for rank, _ in of_ranks], [host for _, host in of_ranks if host]
    for host, name in zip(hosts, unique([host["host"] for host in hosts]), strict=True):
        host["host"] = name
    names = [host["host"] for host in hosts]
    pairs: dict[tuple[str, str], list[float]] = {}
    for rank in ranks:
        node, local = divmod(rank["rank"], per_host)
        rank["host"] = names[node]
        for partner, speed in rank.pop("pairs"):
            pair = (names[min(node, partner)], names[max(node, partner)])
            rails = pairs.setdefault(pair, [float("inf")] * per_host)
            rails[local] = min(rails[local], speed)
    unfit = misfits(hosts, ranks, pairs, _expected(run, ranks))
    out = sorted({misfit.host for misfit in unfit if misfit.leave_out})
    return {
        "ok": not unfit,
        "lines": [misfit.report(names.index(misfit.host)) for misfit in unfit],
        "leave_out": out,
        "nodes": [names.index(name) for name in out],
        "misfits": [vars(misfit) | {"line": misfit.line} for misfit in unfit],
        "hosts": hosts,
        "ranks": ranks,
        "pairs": [{"hosts": pair, "rails": rails} for pair, rails in pairs.items()],
    }


def _expected(run: Run, ranks: list[dict]) -> Expected:
    preset = PRESETS[run.gang.network] if run.gang.network else None
    gpu = by_device((ranks[0].get("gpu") or {}).get("name", ""))
    if gpu is None:
        return Expected(adapters=preset.adapters if preset else None)
    network = preset.network * 1e9 if preset and preset.network else None
    return Expected(network, gpu.link, preset.adapters if preset else None)


def summary(verdict: dict[str, Any]) -> str:
    """Summarize the measurements in one line."""
    ranks, hosts = verdict["ranks"], verdict["hosts"]
    parts = [f"{len(hosts)} host{'s' * (len(hosts) > 1)}, {len(ranks)} rank{'s' * (len(ranks) > 1)}"]
    for key, name in (("link", "within a host"), ("all_reduce", "all-reduce"), ("all_to_all", "all-to-all")):
        if values := [rank[key] for rank in ranks if key in rank]:
            parts.append(f"{name} {min(values) / 1e9:.3g} GB/s")
    if verdict["pairs"]:
        slowest = min(verdict["pairs"], key=lambda pair: min(pair["rails"]))
        parts.append(f"slowest pair {' and '.join(slowest['hosts'])} {min(slowest['rails']) / 1e9:.3g} GB/s")
    parts.append(f"{min(rank['speed'] for rank in ranks) / 1e12:.3g} TFLOP/s")
    count = len(verdict["lines"])
    fit = f"{count} fault{'s' * (count > 1)}" if count else "all fit"
    return f"{', '.join(parts)}: {fit}, in {verdict['seconds']} s"


if __name__ == "__main__":
    entry.start(main, lambda run: None)  # it reads no file of the run, and may start before the model exists
