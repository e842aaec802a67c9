"""The steps of a reinforcement learning, as a callback of Megatron-Bridge's loop: before each of its steps there is
something to train on.

    weights to vLLM -> probe -> answers -> rewards -> journal -> the loop's own step

What only one process can do, rank 0 does: it has vLLM, the rewards and the journal. The others hear the outcome
(trainer/reinforcement/first_rank.py).
"""

# pyright: reportOptionalMemberAccess=false, reportOptionalCall=false, reportArgumentType=false

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.state import TrainState
from megatron.core import parallel_state
from torch import distributed

from conf.rules.reinforcement import cut, in_turn, without_signal
from conf.schema.run import Run
from contract.files import write_atomically
from trainer.megatron.recipe import last_step
from trainer.reinforcement import probe
from trainer.reinforcement.batches import Form, micro_batches
from trainer.reinforcement.first_rank import FirstRank
from trainer.reinforcement.journal import Journal
from trainer.reinforcement.policy import advantages, exact_logits
from trainer.reinforcement.policy.policy_step import LARGEST, Feed, PolicyStep, Temperature
from trainer.reinforcement.policy.policy_step import log_probs as log_probs_of_answers
from trainer.reinforcement.rollouts import Rollouts
from trainer.reinforcement.samples import Scored, Step
from trainer.reinforcement.steps.ahead import Ahead, require_fresh
from trainer.reinforcement.steps.report import Report, add_to_table
from trainer.reinforcement.steps.sampler import Heard, Sampled, Sampler
from trainer.reinforcement.transfer import in_memory
from trainer.reinforcement.transfer.export import Export
from trainer.serving import prompts
from trainer.startup import device
from trainer.startup.console import say
from trainer.training.gradient_signal import GradientSignal
from trainer.training.gradients import cosine_with_mean
from trainer.training.metrics import Metrics
from trainer.training.parity import log_probs

RESULT = "reinforced.json"
UNHEARD = 20  # optimizer steps after which gradients that are nothing but noise are told of


class Reinforcement(Callback):
    """All steps, from what the run's section reinforce says."""

    def __init__(
        self,
        run: Run,
        bridge: Any,
        rollouts: Rollouts | None,
        feed: Feed,
        step: PolicyStep,
        metrics: Metrics,
        fresh: bool,
    ):
        self.run, self.asked, self.bridge, self.rollouts = run, run.reinforce, bridge, rollouts
        self.feed, self.policy_step, self.metrics, self.fresh = feed, step, metrics, fresh
        self._on_first = FirstRank()
        self.output = Path(run.paths.output)
        self.journal = Journal(self.output)
        self.temperature = Temperature(self.asked.temperature)
        self.template = prompts.template(run, run.paths.model)
        folder = prompts.folder(run)
        self.rows = prompts.read(folder / "training.jsonl", None)
        test = folder / "test.jsonl"
        self.held_out = prompts.read(test, self.asked.held_out) if self.asked.held_out and test.exists() else []
        self.step: Step | None = None
        self.said: list[list[float]] | None = None  # what Megatron said of the probe's rows, with the version before
        self.lag = 0.0  # steps that the step's weights are behind the policy
        self.report = Report(run)
        self.signal = None if without_signal(run) else GradientSignal(self.asked.signal)
        self.seconds: dict[str, float] = {}  # of each phase of the step
        self.reported: float | None = None  # when the step before was
        self.in_use: dict[str, int] = {}  # bytes of the GPU, while vLLM is awake and while it sleeps
        self.export: Export | None = None
        self.sampler, self.ahead = None, None
        if rollouts:
            # A tokenizer is not for two threads at once: what samples beside training has its own.
            template = prompts.template(run, run.paths.model) if self.asked.staleness else self.template
            self.sampler = Sampler(run, rollouts, template, self.rows, folder / "training.jsonl")
            self.ahead = Ahead(self.sampler, self.journal, self.asked) if self.asked.staleness else None
        self.probe_rows = probe.rows(
            [[*chain(*self.template.tokens(row))] for row in (self.held_out or self.rows)[:64]],
            self.asked.probe_rows,
            run.data.seq_length - probe.WRITTEN - 1,
        )

    def on_data_init_start(self, context: Any) -> None:
        """Begin to count at 0 where the policy comes from a training with steps of its own."""
        if self.fresh:
            context.state.train_state = TrainState()

    def on_train_start(self, context: Any) -> None:
        if self.run.train.precision != "fp32":
            exact_logits.install(context.model)
        self.temperature.install(context.model)
        if self.asked.replay_experts:
            self.policy_step.replay.install(context.model)
        self._on_first(lambda: self.rollouts.ready())
        done = context.state.train_state.step
        if self.signal and done:
            self.signal.resume(self._on_first(lambda: self._signal_after(done)))
        # Behind the first step it cannot be asked any more, should somebody have removed it.
        if self.held_out and not done and self._on_first(lambda: self.journal.noted("before") is None):
            self._transfer(context, 0)
            self._on_first(lambda: self.journal.note("before", {"exact_match": self.sampler.greedy(self.held_out)}))

    def on_train_step_start(self, context: Any) -> None:
        number, update = divmod(context.state.train_state.step, self.asked.updates)
        if self.step is None or self.step.number != number + 1:
            self.seconds = {}
            self.step = self._next(context, number + 1)
            self.policy_step.take()
        self.began = time.monotonic()
        self._feed(context, update)
        if self.signal:
            self.signal.shorten(context.optimizer)

    def on_train_step_end(self, context: Any) -> None:
        done = context.state.train_state.step + 1  # Bridge counts it later
        self.seconds["train"] = self.seconds.get("train", 0.0) + time.monotonic() - self.began
        with self._phase("signal"):
            signal = self._listen(context, done)
        self.policy_step.replay.end()
        if done % self.asked.updates == 0:
            self._report(done, self._figures() | signal)

    def _listen(self, context: Any, done: int) -> dict[str, float]:
        """Figures of what this optimizer step's gradient had in common with those before it."""
        if self.signal is None:
            return {}
        length, cosine = self.signal.length, 0.0
        if not context.skipped_iter:
            cosine = cosine_with_mean(context.optimizer, self.run.optimizer.beta1)
            self.signal.add(cosine)
        self._on_first(lambda: self.journal.note(_noted(done), self.signal.state()))
        if done == UNHEARD and self.signal.value < 1:
            say(
                f"reinforce.reward: the gradients of the first {done} optimizer steps have no more in common than noise"
                f" ({self.signal.value:.1f} deviations): rewards may have nothing to do with answers, or "
                "reinforce.prompts and reinforce.samples are too few to show what they have"
            )
        return {"gradient_cosine": cosine, "gradient_signal": self.signal.value, "step_length": length}

    def _signal_after(self, done: int) -> dict[str, float]:
        found = self.journal.noted(_noted(done))
        return GradientSignal(self.asked.signal).state() if found is None else found

    def on_checkpoint_save(self, context: Any) -> None:
        """Ask the held-out rows with the last weights, before their checkpoint is marked complete."""
        step = context.state.train_state.step
        if step != last_step(self.run) or not self.held_out:
            return
        self._transfer(context, step)
        self._on_first(self._result)

    def _next(self, context: Any, number: int) -> Step:
        """The step, as rank 0 has it: from the journal, or made for it."""
        found = self._ahead(context, number) if self.asked.staleness else self._sampled(context, number)
        step = found.step
        self.seconds |= found.seconds
        self.lag = require_fresh(step, self.asked)
        if self.asked.updates > 1 and not step.old:
            step.old = self._old(context, step)
            self._on_first(lambda: self.journal.write(step))
        return step

    def _sampled(self, context: Any, number: int) -> Sampled:
        """The step from the journal, or made now and written there."""
        found = self._on_first(lambda: self.journal.read(number))
        if found is not None:
            self._on_first(self._sleep)
            say(f"step {number}: trained on the answers in {self.journal.folder}")
            return Sampled(found, {})
        version = context.state.train_state.step
        self._transfer(context, version)
        found = self._on_first(lambda: self.sampler.step(number, version))
        with self._phase("sleep"):
            self._on_first(self._sleep)
        if self.asked.updates == 1:
            with self._phase("journal"):
                self._on_first(lambda: self.journal.write(found.step))
        return found

    def _ahead(self, context: Any, number: int) -> Sampled:
        """The step as it was made while others were trained on. vLLM gets the weights where it waits for some."""
        version, start = context.state.train_state.step, time.monotonic()
        found = self._on_first(lambda: self.ahead.take(number))
        waited = time.monotonic() - start
        if self._on_first(lambda: self.ahead.wants(version)):
            self._transfer(context, version)
            self._on_first(lambda: self.ahead.begin(version))
        if found is None:
            start = time.monotonic()
            found = self._on_first(lambda: self.ahead.take(number))
            waited += time.monotonic() - start
        self.seconds["wait"] = waited
        return found

    def _transfer(self, context: Any, version: int) -> None:
        """Give vLLM the weights as they are, and look whether it computes with them."""
        with self._phase("transfer"):
            self._make_room()
            start = time.monotonic()
            if self.asked.transport == "adapter":
                self.sent = self._adapter(context, version)
            else:
                tensors = self._weights(context)
                self.sent = self._on_first(lambda: self.rollouts.update(tensors, version, self.export), tensors)
            self.rate = self.sent / 1e9 / (time.monotonic() - start)
            self._make_room()
            self._on_first(lambda: self.rollouts.begin())
        with self._phase("probe"):
            self._probe(context, version)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Count the time of a block as that of a phase of the step."""
        start = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def _make_room(self) -> None:
        """Leave vLLM what every rank holds of its GPU and does not use, where vLLM is on GPUs of several ranks."""
        if device.has_gpu() and in_turn(self.run) and cut(self.run) * self.asked.engines > 1:
            torch.cuda.empty_cache()
            distributed.barrier()

    def _weights(self, context: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors as released, one after another. Every rank has to take all of them."""
        start, self.seconds["export"] = time.monotonic(), 0.0
        self.export = self.export or Export(self.bridge, context.model)
        for named in self.export.tensors():
            self.seconds["export"] += time.monotonic() - start
            yield named
            start = time.monotonic()

    def _sleep(self) -> None:
        """Leave the GPU to the training."""
        self.in_use["awake"] = device.memory_in_use()
        self.rollouts.sleep()
        self.in_use["asleep"] = device.memory_in_use()

    def _adapter(self, context: Any, version: int) -> int:
        """Give vLLM the adapter alone. Every rank has a part of it, and the first one writes it."""
        with in_memory.folder() as folder:
            adapter = context.state.cfg.peft
            self.bridge.save_hf_adapter(context.model, folder, adapter, self.run.paths.model, show_progress=False)
            return self._on_first(lambda: self.rollouts.adapt(folder, version))

    def _probe(self, context: Any, version: int) -> None:
        """Hold what every engine says of fixed rows against what Megatron says of them."""
        heard = self._on_first(lambda: self.sampler.hear(self.probe_rows))
        rows = [row for one in heard for row in one.rows]
        different = [row for number, row in enumerate(rows) if row not in rows[:number]]
        with self.temperature.off():
            found = log_probs(self.run, context, different)
        before, self.apart = self.said, 0.0
        for one in heard:
            self._judge([found[different.index(row)] for row in one.rows], one, before, version)

    def _judge(self, found: list[list[float]], heard: Heard, earlier: list[list[float]] | None, version: int) -> None:
        known = [len(row) - probe.WRITTEN - 1 for row in heard.rows]
        said = [one[:count] for one, count in zip(found, known, strict=True)]
        behind = [one[count : count + probe.WRITTEN] for one, count in zip(found, known, strict=True)]
        differences = probe.Differences(probe.mean(heard.read, said), probe.mean(heard.written, behind))
        before = probe.mean(heard.read, earlier) if earlier and earlier != said else None
        self.said, self.apart = said, max(self.apart, differences.read, differences.written)
        # Copies of the model may differ in the last bit: one of them judges for all.
        self._on_first(lambda: probe.judge(differences, probe.bound(self.run), before, (heard.version, version)))

    def _scored(self, step: Step) -> list[list[Scored]]:
        """Sequences of each optimizer step."""
        found = [
            Scored(group.prompt, answer.tokens, answer.log_probs, worth, None, None, answer.routes)
            for group in step.groups
            for answer, worth in zip(group.answers, advantages.of_group(group.rewards, self.asked.loss), strict=True)
        ]
        size = len(found) // self.asked.updates
        if step.old:
            found = [replace(one, old=old) for one, old in zip(found, step.old, strict=True)]
        return [found[start : start + size] for start in range(0, len(found), size)]

    def _old(self, context: Any, step: Step) -> list[list[float]]:
        """Log-probabilities of all answers by the policy as it is, before the first of several updates."""
        whole: list[list[float]] = []
        for answers in self._scored(step):
            found = self._log_probs(context, answers)
            shares: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(shares, found)
            merged = {number: values for share in shares for number, values in share.items()}
            whole += [merged[number] for number in range(len(answers))]
        return whole

    def _log_probs(self, context: Any, answers: list[Scored]) -> dict[int, list[float]]:
        found = log_probs_of_answers(self.run, context, self.policy_step, self._micro_batches(answers))
        self.policy_step.replay.end()
        return found

    def _micro_batches(self, answers: list[Scored]) -> list[dict[str, torch.Tensor]]:
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        return micro_batches(answers, Form.of(self.run), rank, ranks)

    def _feed(self, context: Any, update: int) -> None:
        answers = self._scored(self.step)[update]
        if self.asked.kl:
            with context.state.cfg.peft.disable_adapter(context.model):
                reference = self._log_probs(context, answers)
            answers = [replace(one, reference=reference.get(number)) for number, one in enumerate(answers)]
        self.policy_step.begin(answers)
        batches, form = self._micro_batches(answers), Form.of(self.run)
        positions = len(batches) * parallel_state.get_data_parallel_world_size() * form.rows * form.length
        self.metrics.counted = sum(len(one.prompt) + len(one.answer) - 1 for one in answers), positions
        self.feed.give(batches)

    def _figures(self) -> dict[str, float]:
        """Figures of all ranks. Losses are computed on the last stage, by each of its ranks alike."""
        shares: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(shares, self.policy_step.take())
        found: dict[str, float] = {}
        for share in shares:
            for key, value in share.items():
                found[key] = max(found.get(key, 0.0), value) if key == LARGEST else found.get(key, 0.0) + value
        tokens = max(1.0, found.pop("tokens"))
        return {key: value if key == LARGEST else value / tokens for key, value in found.items()}

    def _report(self, done: int, figures: dict[str, float]) -> None:
        """Write the step's line, and end the run where it has no sense to go on."""
        now = time.monotonic()
        if self.reported is not None:  # what is in no phase: the report before, and Megatron-Bridge between steps
            told = sum(seconds for name, seconds in self.seconds.items() if name != "export")  # a part of transfer
            self.seconds["rest"] = now - self.reported - told
        self.reported = now
        line = self.report.line(self.step, done, self.lag, figures, self.seconds)
        if "transfer" in self.seconds:
            line |= {"probe": self.apart, "sent_mb": self.sent / 1e6, "sent_gb_per_second": self.rate}
            line |= {f"gpu_gb_{state}": size / 1e9 for state, size in self.in_use.items() if size}
        line |= {"engines": self._on_first(lambda: len(self.rollouts.engines))}
        self.metrics.write(line)
        self.report.show(self.step, line, self.seconds)
        self._on_first(lambda: add_to_table(self.output, self.step, self.template, self.rows))
        self.report.require_sense(self.step, line)

    def _result(self) -> None:
        before = (self.journal.noted("before") or {}).get("exact_match")
        after = self.sampler.greedy(self.held_out)
        facts = {"steps": self.asked.steps, "held_out": len(self.held_out), "after": after}
        facts |= {} if before is None else {"before": before}
        write_atomically(self.output / RESULT, json.dumps(facts), durable=True)
        self.metrics.write({"kind": "held_out", "step": last_step(self.run), "time": time.time(), "exact_match": after})
        known = "not known" if before is None else f"{before:.3f}"
        say(f"held out: greedy exact match {known} before, {after:.3f} after, of {len(self.held_out)} rows")


def _noted(done: int) -> str:
    """Name in the journal of what gradients had in common after so many optimizer steps."""
    return f"signal-{done:06d}"
