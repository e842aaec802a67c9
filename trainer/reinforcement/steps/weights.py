"""Transfer of the policy's weights to vLLM, with the probe after it. vLLM and Megatron may use the same GPU in turn."""

# pyright: reportOptionalMemberAccess=false

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from conf.rules.reinforcement import cut, in_turn
from conf.schema.run import Run
from trainer.reinforcement import probe
from trainer.reinforcement.first_rank import FirstRank
from trainer.reinforcement.policy.policy_step import Temperature
from trainer.reinforcement.steps.phases import Phases
from trainer.reinforcement.steps.sampler import Probed, Sampler
from trainer.reinforcement.transfer import in_memory
from trainer.reinforcement.transfer.export import Export
from trainer.startup import device
from trainer.training.parity import log_probs


class Weights:
    """The weights of the policy for vLLM. Every rank makes the same calls; only rank 0 has a sampler."""

    def __init__(
        self, run: Run, bridge: Any, sampler: Sampler | None, on_first: FirstRank, probe_rows: list[list[int]]
    ):
        self.run, self.bridge, self.sampler, self.on_first, self.probe_rows = run, bridge, sampler, on_first, probe_rows
        self.temperature, self.phases = Temperature(run.reinforce.temperature), Phases()
        self.export: Export | None = None
        self.previous: list[list[float]] | None = None  # Megatron's log-probabilities at the last probe
        self.difference = self.rate = 0.0  # of the last probe; GB/s of the last transfer
        self.sent = 0  # bytes
        self.in_use: dict[str, int] = {}  # bytes of the GPU, while vLLM is awake and while it sleeps

    def send(self, context: Any, version: int) -> None:
        """Send the current weights to vLLM, and check by the probe that vLLM computes with them."""
        with self.phases.measure("transfer"):
            self._make_room()
            start = time.monotonic()
            if self.run.reinforce.transport == "adapter":
                self.sent = self._send_adapter(context, version)
            else:
                tensors = self.tensors(context)
                self.sent = self.on_first(lambda: self.sampler.rollouts.update(tensors, version, self.export), tensors)
            self.rate = self.sent / 1e9 / (time.monotonic() - start)
            self._make_room()
            self.on_first(lambda: self.sampler.rollouts.begin())
        with self.phases.measure("probe"):
            self._probe(context, version)

    def sleep(self) -> None:
        """Free the GPU for training. Only rank 0 calls it."""
        self.in_use["awake"] = device.memory_in_use()
        self.sampler.rollouts.sleep()
        self.in_use["asleep"] = device.memory_in_use()

    def figures(self) -> dict[str, float]:
        """Figures of the last transfer, for the step's line."""
        sent = {"probe": self.difference, "sent_mb": self.sent / 1e6, "sent_gb_per_second": self.rate}
        return sent | {f"gpu_gb_{state}": size / 1e9 for state, size in self.in_use.items() if size}

    def tensors(self, context: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors in the released format, one after another. Every rank must take all of them."""
        start, self.phases.seconds["export"] = time.monotonic(), 0.0
        self.export = self.export or Export(self.bridge, context.model)
        for named in self.export.tensors():
            self.phases.seconds["export"] += time.monotonic() - start
            yield named
            start = time.monotonic()

    def _make_room(self) -> None:
        """Free the unused memory of all ranks' GPUs, if vLLM uses GPUs of several ranks."""
        if device.has_gpu() and in_turn(self.run) and cut(self.run) * self.run.reinforce.engines > 1:
            torch.cuda.empty_cache()
            distributed.barrier()

    def _send_adapter(self, context: Any, version: int) -> int:
        """Send only the adapter. Every rank has a part of it, and rank 0 writes it."""
        with in_memory.folder() as folder:
            adapter = context.state.cfg.peft
            self.bridge.save_hf_adapter(context.model, folder, adapter, self.run.paths.model, show_progress=False)
            return self.on_first(lambda: self.sampler.rollouts.adapt(folder, version))

    def _probe(self, context: Any, version: int) -> None:
        """Compare every engine's log-probabilities of fixed rows with Megatron's."""
        of_engines = self.on_first(lambda: self.sampler.probe(self.probe_rows))
        rows = [row for probed in of_engines for row in probed.rows]
        distinct = [row for number, row in enumerate(rows) if row not in rows[:number]]
        with self.temperature.off():
            values = log_probs(self.run, context, distinct)
        previous, self.difference = self.previous, 0.0
        for probed in of_engines:
            self._judge([values[distinct.index(row)] for row in probed.rows], probed, previous, version)

    def _judge(
        self, values: list[list[float]], probed: Probed, previous: list[list[float]] | None, version: int
    ) -> None:
        counts = [len(row) - probe.WRITTEN - 1 for row in probed.rows]
        read = [of_row[:count] for of_row, count in zip(values, counts, strict=True)]
        written = [of_row[count : count + probe.WRITTEN] for of_row, count in zip(values, counts, strict=True)]
        differences = probe.mean(probed.read, read), probe.mean(probed.written, written)
        before = probe.mean(probed.read, previous) if previous and previous != read else None
        self.previous, self.difference = read, max(self.difference, *differences)
        # Copies of the model may differ in the last bit: rank 0 judges for all.
        self.on_first(lambda: probe.judge(differences, probe.bound(self.run), before, (probed.version, version)))
