"""The trainer's side of vLLM: a process beside it, what it is asked, and the weights that it is given.

Rank 0 has the process. It is told things over a socket pair that nobody else can reach, and is gone when this process
is. What it prints is in <paths.logs>/rollout.log.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from conf.model_facts import facts_from_hf
from conf.model_files import config_json
from conf.planner import hardware
from conf.planner.serving import rollout
from conf.rules.reinforcement import ADAPTED
from conf.schema.run import Run
from contract import nvidia_smi
from contract.faults import Fault
from contract.processes import end_with_parent
from trainer.patches import vllm_cpu
from trainer.reinforcement import messages
from trainer.reinforcement.transfer import shared_memory, wire
from trainer.serving import unmerged
from trainer.serving.engine import DTYPE
from trainer.startup import device

# What torchrun tells its ranks; vLLM would take it for its own.
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
OF_RANKS += ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GROUP_WORLD_SIZE", "ROLE_NAME")
BLOCK = 16  # tokens of a block of keys and values on a CPU: its default holds a whole row, and is never shared
SHOWN = 3  # last lines of a log
WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of what it holds on a GPU


class Rollouts:
    """vLLM in a process of its own."""

    def __init__(self, run: Run):
        self.run, self.version, self.transport = run, -1, transport(run)
        self.sleeps, self.asleep = device.has_gpu(), set[str]()
        self.log = Path(run.paths.logs) / "rollout.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.settings = tempfile.NamedTemporaryFile("w", prefix="rollout-", suffix=".json")  # noqa: SIM115
        settings = {"kernels": run.paths.kernels, "transport": self.transport, "arguments": arguments(run)}
        json.dump(settings, self.settings)
        self.settings.flush()
        mine, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if not _is_of_ranks(name)}
        with self.log.open("a") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer.reinforcement.vllm_process", str(theirs.fileno()), self.settings.name],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                preexec_fn=end_with_parent,
            )
        self.connection = Connection(mine.detach())
        self.pipe: wire.Pipe | None = None
        self.started = self.joined = False

    def ready(self) -> None:
        """Wait until vLLM has loaded the released model."""
        if not self.started:
            self._answer("start")
            self.started = True

    def call(self, name: str, **arguments: Any) -> Any:
        self._ask(name, arguments)
        return self._answer(name)

    def update(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        """Give vLLM all weights of a version. Returns how many bytes went over."""
        self.wake(WEIGHTS)
        sent = self._by_file(tensors, version) if self.transport == "files" else self._by(tensors, version)
        self.wake()
        self.call("forget")
        return sent

    def adapt(self, folder: str, version: int) -> int:
        """Give vLLM the adapter of a version, from a folder in PEFT's format. Returns how many bytes went over."""
        self.wake()
        found = load_file(Path(folder) / unmerged.WEIGHTS)
        metas = [wire.meta(name, tensor) for name, tensor in found.items()]
        self.call("adapt", folder=folder, metas=metas, version=version)
        self.call("forget")
        return sum(one.bytes for one in metas)

    def close(self) -> None:
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.settings.close()

    def sleep(self) -> None:
        """Have vLLM leave the GPU to the trainer. It forgets what will be sent again anyway."""
        if self.sleeps and not self.asleep:
            self.call("sleep", level=1 if self.transport == "adapter" else 2)
            self.asleep = {WEIGHTS, CACHE}

    def wake(self, *parts: str) -> None:
        """Have vLLM take its memory again, all of it or these parts. The trainer leaves what it holds and does not use.

        The cache of keys and values comes behind the weights, when what they were sent through is free again.
        """
        if waking := self.asleep & set(parts or self.asleep):
            torch.cuda.empty_cache()
            self.call("wake_up", parts=sorted(waking))
            self.asleep -= waking

    def _by(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        if not self.joined:
            self._join()
        self.call("begin")
        sent = self._send_all(tensors)
        self.call("finish", version=version)
        if self.transport == "ipc":
            shared_memory.collect()
        return sent

    def _send_all(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
        sent, waiting = 0, False
        allocate, size = self._memory()
        handles: dict[int, Any] = {}  # by address: a second one of the same memory would keep it from being freed
        for bucket in wire.buckets(tensors, allocate, size):
            if waiting:  # until vLLM is done with the bucket before, whose memory is filled next
                self._answer("bucket")
            self._send(bucket, handles)
            waiting = True
            sent += sum(one.bytes for one in bucket.metas)
        if waiting:
            self._answer("bucket")
        return sent

    def _join(self) -> None:
        if self.transport == "ipc":
            self.call("join", port=None)
        else:
            port = _free_port()
            self._ask("join", {"port": port})
            where = torch.device("cuda" if self.transport == "nccl" and device.has_gpu() else "cpu")
            self.pipe = wire.Pipe(port, 0, where, gone=lambda: self.process.poll() is not None)
            self._answer("join")
        self.joined = True

    def _memory(self) -> tuple[Callable[[int], torch.Tensor], int]:
        """What allocates memory for buckets, and how many bytes a bucket has."""
        if self.transport == "ipc":
            return shared_memory.allocate, wire.BUCKET_OF_GPU if device.has_gpu() else wire.BUCKET
        where, size = ("cuda", wire.BUCKET_OF_GPU) if device.has_gpu() else ("cpu", wire.BUCKET)
        if self.transport == "gloo":
            size = wire.BUCKET
        return (lambda size: torch.empty(size, dtype=torch.uint8, device=where)), size

    def _send(self, bucket: wire.Bucket, handles: dict[int, Any]) -> None:
        shared, place = None, bucket.memory.data_ptr()
        if self.transport == "ipc":
            shared = handles[place] = handles.get(place) or shared_memory.shared(bucket.memory)
        self._ask("bucket", {"metas": bucket.metas, "used": bucket.used, "shared": shared})
        if self.pipe is None:
            return
        try:
            self.pipe.send(bucket.bytes)
        except RuntimeError:
            self._answer("bucket")  # says why it is gone
            raise

    def _by_file(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        model = Path(self.run.paths.model)
        with tempfile.TemporaryDirectory(prefix="rollout-", dir="/dev/shm") as folder:
            for file in model.glob("*.json"):
                if not file.name.endswith(".index.json"):
                    shutil.copy(file, folder)
            found = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors}
            metas = [wire.meta(name, tensor) for name, tensor in found.items()]
            save_file(found, Path(folder) / "model.safetensors")
            self.call("load", folder=folder, metas=metas, version=version)
        return sum(one.bytes for one in metas)

    def _ask(self, name: str, arguments: dict[str, Any]) -> None:
        self.ready()
        try:
            messages.send(self.connection, (name, arguments))
        except OSError:
            raise self._gone(name) from None

    def _answer(self, name: str) -> Any:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._gone(name) from None
        if "error" in answer:
            raise Fault(f"rollout: {name}: {answer['error']} ({self.log})")
        self.version = answer["version"]
        return answer["result"]

    def _gone(self, name: str) -> Fault:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        last = f": {' | '.join(line[:200] for line in lines[-SHOWN:])}" if self.process.returncode == 1 else ""
        return Fault(
            f"rollout: {name}: vLLM's process has ended with code {self.process.returncode}{last} ({self.log})"
        )


def transport(run: Run) -> str:
    """The way that weights get to vLLM on this host."""
    asked = run.reinforce.transport or ("ipc" if device.has_gpu() else "gloo")
    if asked == "nccl" and not device.has_gpu():
        raise Fault("reinforce.transport: nccl goes from GPU to GPU, and this host has none; gloo does not")
    return asked


def arguments(run: Run) -> dict[str, Any]:
    """Arguments of vLLM."""
    asked, length = run.reinforce, run.data.seq_length
    together = asked.prompts * asked.samples
    found: dict[str, Any] = {
        "model": run.paths.model,
        "dtype": DTYPE[run.train.precision],
        "trust_remote_code": run.model.trust_remote_code,
        "seed": asked.seed,
        "max_model_len": length,
        "max_num_seqs": min(256, together),
        "logprobs_mode": "processed_logprobs",  # at the temperature that was sampled at
        "disable_log_stats": True,
    }
    if asked.replay_experts:
        found["enable_return_routed_experts"] = True
    if asked.transport == "adapter":
        layers = frozenset(name for target in run.adapter.names for name in ADAPTED[target])
        found |= unmerged.Adapter(Path(), run.name, run.adapter.rank, layers).settings(1, expert_parallel=False)
    if vllm_cpu.is_installed():
        # Seeds of single requests fail there where a prompt is read in parts: "CPU Generator does not use offset"
        found |= {"enforce_eager": True, "block_size": BLOCK, "max_num_batched_tokens": together * length}
    if device.has_gpu():
        found |= {"enable_sleep_mode": True} | _share(run)
    return found


def _share(run: Run) -> dict[str, Any]:
    """Settings that keep vLLM to its share of the GPU, as the plan counts on it."""
    facts = facts_from_hf(config_json.read(Path(run.paths.model) / config_json.NAME))
    gpu = hardware.by_device(nvidia_smi.kind() or "") or hardware.of(run)
    if not gpu.cuda:  # of a kind that nobody has described
        return {}
    found = rollout.of(run, facts, gpu)
    if found.lacks > 0:
        if run.hardware.gate != "warn":
            raise Fault(f"reinforce: {rollout.unanswered(run, facts, gpu)}")
        return {}
    return {
        "gpu_memory_utilization": round(found.taken / gpu.memory, 3),
        "kv_cache_memory_bytes": found.cache,
        "max_num_batched_tokens": found.way.tokens,
    }


def _is_of_ranks(name: str) -> bool:
    return name in OF_RANKS or name.startswith(("TORCHELASTIC", "GANG_"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
