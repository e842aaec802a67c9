"""Speed of transfers of a folder to S3 and back: this project's, boto3's upload_file in a loop, and TransferManager.

    python -m benchmarks.store [--gib 4] [--files 2000] [--rounds 1]          make bench-store; 10 minutes
    python -m benchmarks.store --short      a quarter of a GiB in 200 files: 1 minute   make bench-store SHORT=1

The S3 is moto's server in a separate process, over HTTP on this host. Each measurement is a separate process, and all
run alternately. TransferManager gets as many threads as this project's code, and runs twice: with its own part sizes
and with this project's. All read and write the same disk, from the page cache. The benchmark needs three times --gib of
disk and, because moto reads the complete object for each requested range, up to 10 times the largest file (at most 1
GB) of memory.

Not covered: a network. The server uses the same cores, so the times include its work.
"""

import argparse
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.workspace import workspace
from tasks.store import File, open_store
from tasks.store.folder import THREADS, walk
from tasks.store.s3_download import PIECE
from tasks.store.s3_upload import PART
from tests.support import s3_server

ROOT = Path(__file__).parents[1]
BUCKET = "bench"
WAYS = {
    "ours": "tasks/store/s3.py",
    "loop": "loop of upload_file/download_file",
    "manager": "TransferManager",
    "ranges": "TransferManager, ranges as ours",
}


def sizes(total: int, count: int) -> list[int]:
    """Sizes from 1 KB to 1 GB: most files small, most bytes in a few large ones, as in a checkpoint."""
    draw = random.Random(0)
    large = [int(total * share) for share in (0.2325, 0.12, 0.12, *[0.05] * 6)]  # 1 GB of 4 GiB first
    few = min(20, count // 20)
    limit = max(1000, 2 * total // 10 // (count - few))
    small = [int(1000 * math.exp(draw.uniform(0, math.log(limit / 1000 + 1)))) for _ in range(count - few - len(large))]
    small[0] = 1000
    rest = total - sum(large) - sum(small)
    return [*large, *small, *[rest // few] * few]


def generate(folder: Path, total: int, count: int) -> int:
    written = 0
    for i, size in enumerate(sizes(total, count)):
        path = folder / f"{i % 20:02}" / f"{i:05}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as f:
            for start in range(0, size, 16 << 20):  # holes between: their speed is not the subject
                f.seek(start)
                f.write(os.urandom(min(1 << 20, size - start)))
            f.truncate(size)
        written += size
    return written


def transfer(way: str, direction: str, folder: Path, prefix: str, known: Path) -> None:
    """Make one measurement in its own process, and print its figures as JSON."""
    import boto3
    from botocore.config import Config
    from s3transfer.manager import TransferConfig, TransferManager

    store = open_store(f"s3://{BUCKET}")
    client = boto3.client("s3", config=Config(max_pool_connections=max(THREADS, 10)))
    store.keys("nothing")  # both clients exist before the clock starts
    client.list_objects_v2(Bucket=BUCKET, MaxKeys=1)
    names = [str(path.relative_to(folder)) for path in walk(folder).values()] if direction == "up" else []
    files = {n: File(**f) for n, f in json.loads(known.read_text()).items()} if direction == "down" else {}
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    if way == "ours" and direction == "up":
        files = store.put(folder, prefix)
    elif way == "ours":
        store.get(prefix, files, folder)
    elif way == "loop" and direction == "up":
        for name in names:
            client.upload_file(str(folder / name), BUCKET, f"{prefix}/{name}")
    elif way == "loop":
        for name in files:
            client.download_file(BUCKET, f"{prefix}/{name}", str(folder / name))
    else:
        chunk = {} if way == "manager" else {"multipart_chunksize": PART if direction == "up" else PIECE}
        with TransferManager(client, TransferConfig(max_request_concurrency=THREADS, **chunk)) as manager:
            if direction == "up":
                futures = [manager.upload(str(folder / name), BUCKET, f"{prefix}/{name}") for name in names]
            else:
                futures = [manager.download(BUCKET, f"{prefix}/{name}", str(folder / name)) for name in files]
            for future in futures:
                future.result()
    seconds = time.perf_counter() - start
    if way == "ours" and direction == "up":
        known.write_text(json.dumps({name: vars(file) for name, file in files.items()}))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak = int(status["VmHWM"].split()[0]) / 1000
    print(json.dumps(dict(seconds=seconds, cpu=(used.ru_utime + used.ru_stime) / seconds, peak=peak)))


def measure(server: psutil.Process, *arguments: object) -> dict[str, float]:
    before, start, host = server.cpu_times(), time.perf_counter(), psutil.cpu_times()
    command = [sys.executable, "-m", "benchmarks.store", "--transfer", *map(str, arguments)]
    child = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    after, seconds = server.cpu_times(), time.perf_counter() - start
    figures = json.loads(child.stdout.splitlines()[-1])
    used = after.user + after.system - before.user - before.system
    now = psutil.cpu_times()
    idle = (now.idle - host.idle) / seconds  # waiting for the disk is not idling
    return figures | {"server": used / seconds, "host": (os.cpu_count() or 1) - idle}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description="Time transfers to and from S3.")
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="as --gib 0.25 --files 200")
    parser.add_argument("--transfer", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.transfer:
        way, direction, folder, prefix, known = options.transfer
        return transfer(way, direction, Path(folder), prefix, Path(known))
    if options.short:
        options.gib, options.files = 0.25, 200
    if options.files < 100 or options.gib * 2**30 < options.files * 10_000:
        parser.error("--files takes 100 or more, and --gib 10 KB or more for each")
    if options.gib > 4.3:
        parser.error("--gib takes 4.3 at most: the largest file would pass 1 GB, and moto's memory this host's")
    with workspace("store") as folder, s3_server.running() as (url, pid):
        os.environ.update(s3_server.ENVIRONMENT, AWS_ENDPOINT_URL=url)
        compare(folder, psutil.Process(pid), int(options.gib * 2**30), options.files, options.rounds)


def compare(folder: Path, server: psutil.Process, total: int, count: int, rounds: int) -> None:
    import boto3

    boto3.client("s3").create_bucket(Bucket=BUCKET)
    written = generate(folder / "source", total, count)
    print(f"{written / 2**30:.2f} GiB in {count} files of 1 KB to {max(sizes(total, count)) / 1e6:.0f} MB", flush=True)
    store = open_store(f"s3://{BUCKET}")
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for turn in range(rounds):
        order = [*WAYS][turn % len(WAYS) :] + [*WAYS][: turn % len(WAYS)]
        for direction in ("up", "down"):
            for way in order:
                prefix = way if direction == "up" else "ours"  # all fetch the same objects
                place = folder / ("source" if direction == "up" else "back")
                figures = measure(server, way, direction, place, prefix, folder / "files.json")
                results.setdefault((direction, way), []).append(figures)
                ours = [run["seconds"] for run in results.get((direction, "ours"), ())]
                ratio = f"   ours is {figures['seconds'] / min(ours):.2f} x" if ours and way != "ours" else ""
                print(f"  {direction:5}{way:8} {figures['seconds']:7.1f} s{ratio}", flush=True)
                if direction == "down":
                    shutil.rmtree(place)
                elif way != "ours":
                    store.delete(way)
        store.delete("ours")
    report(results, written)


def report(results: dict[tuple[str, str], list[dict[str, float]]], written: int) -> None:
    best = {key: min(runs, key=lambda run: run["seconds"]) for key, runs in results.items()}
    print(
        f"\n{'':38}{'seconds':>9}{'MB/s':>7}{'ours is':>10}{'peak MB':>9}{'CPU':>6}{'server CPU':>12}{'host CPU':>10}"
    )
    for (direction, way), figures in best.items():
        ratio = figures["seconds"] / best[direction, "ours"]["seconds"]
        peak = max(run["peak"] for run in results[direction, way])
        print(
            f"{direction:5}{WAYS[way]:33}{figures['seconds']:9.1f}{written / 1e6 / figures['seconds']:7.0f}"
            f"{f'{ratio:.2f} x' if way != 'ours' else '':>10}{peak:9.0f}{figures['cpu']:6.2f}{figures['server']:12.2f}"
            f"{figures['host']:10.2f}"
        )
    for direction in ("up", "down"):
        ours = best[direction, "ours"]
        cores = os.cpu_count() or 1
        if ours["server"] >= 0.85:  # one Python process
            limit = "the stand-in server is the limit"
        elif ours["host"] >= 0.85 * cores:
            limit = "the CPU is the limit, shared with the stand-in server and whatever else runs here"
        else:
            limit = "neither the stand-in server nor the CPU is the limit"
        print(f"{direction}: {limit} (cores: server {ours['server']:.2f}, ours {ours['cpu']:.2f}, host of {cores})")


if __name__ == "__main__":
    main()
