"""Reinforcement learning as a callback of Megatron-Bridge's loop.

    step()                      weights to vLLM -> probe -> answers -> rewards -> journal
    on_train_step_start()       calls step() if a new step begins, and gives Bridge the micro batches of an update
    Bridge's optimizer step     trains on them with policy/policy_step.py; a step has reinforce.updates of these
    on_train_step_end()         reports the step after its last update

Rank 0 has vLLM, the rewards and the journal. The other ranks get the results (trainer/reinforcement/first_rank.py).
"""

# pyright: reportOptionalMemberAccess=false, reportOptionalCall=false, reportArgumentType=false

import json
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.state import TrainState
from megatron.core import parallel_state

from conf.rules.reinforcement import without_signal
from conf.schema.run import Run
from contract.files import write_atomically
from trainer.megatron.recipe import last_step
from trainer.reinforcement import probe
from trainer.reinforcement.batches import Form
from trainer.reinforcement.first_rank import FirstRank
from trainer.reinforcement.journal import Journal
from trainer.reinforcement.policy import advantages, exact_logits
from trainer.reinforcement.policy.policy_step import LARGEST, Feed, PolicyStep, add_figures, batches_of_rank, log_probs
from trainer.reinforcement.rollouts import Rollouts
from trainer.reinforcement.samples import Scored, Step
from trainer.reinforcement.steps.ahead import Ahead, require_fresh
from trainer.reinforcement.steps.report import Report, add_to_table
from trainer.reinforcement.steps.sampler import Sampled, Sampler
from trainer.reinforcement.steps.weights import Weights
from trainer.serving import prompts
from trainer.startup.console import say
from trainer.training.gradient_signal import GradientSignal
from trainer.training.gradients import cosine_with_mean
from trainer.training.metrics import Metrics
from trainer.weights.atomic_folder import gather

RESULT = "reinforced.json"
WARN_AT = 20  # optimizer steps after which gradients that are only noise are reported


class Reinforcement(Callback):
    """All steps of the run's section reinforce."""

    def __init__(self, run: Run, bridge: Any, rollouts: Rollouts | None, metrics: Metrics, from_training: bool):
        self.run, self.reinforce, self.metrics, self.from_training = run, run.reinforce, metrics, from_training
        self.feed, self.policy_step = Feed(), PolicyStep(run.reinforce)
        self.output, self.on_first = Path(run.paths.output), FirstRank()
        self.journal, self.report = Journal(self.output), Report(run)
        self.signal = None if without_signal(run) else GradientSignal(self.reinforce.signal)
        self.template = prompts.template(run, run.paths.model)
        folder = prompts.folder(run)
        self.rows = prompts.read(folder / "training.jsonl", None)
        test = folder / "test.jsonl"
        self.held_out = prompts.read(test, self.reinforce.held_out) if self.reinforce.held_out and test.exists() else []
        self.sampler, self.ahead = None, None
        if rollouts:
            # A tokenizer is not for two threads: the thread that samples ahead gets its own.
            template = prompts.template(run, run.paths.model) if self.reinforce.staleness else self.template
            self.sampler = Sampler(run, rollouts, template, self.rows, folder / "training.jsonl")
            self.ahead = Ahead(self.sampler, self.journal, self.reinforce) if self.reinforce.staleness else None
        probe_rows = probe.rows(
            [[*chain(*self.template.tokens(row))] for row in (self.held_out or self.rows)[:64]],
            self.reinforce.probe_rows,
            run.data.seq_length - probe.WRITTEN - 1,
        )
        self.weights = Weights(run, bridge, self.sampler, self.on_first, probe_rows)
        self.phases = self.weights.phases
        self.current: Step | None = None
        self.lag = 0.0  # age in steps, relative to the policy, of the weights that sampled the current step
        self.reported: float | None = None  # time of the last report

    def step(self, context: Any, number: int) -> Step:
        """Make a step ready for training. On a resume, the journal may already have its answers."""
        version = context.state.train_state.step
        if self.reinforce.staleness:
            sampled = self._sampled_ahead(context, number)
        elif step := self.on_first(lambda: self.journal.read(number)):
            self.on_first(self.weights.sleep)
            say(f"step {number}: trained on the answers in {self.journal.folder}")
            sampled = Sampled(step, {})
        else:
            self.weights.send(context, version)
            sampled = self.on_first(lambda: self.sampler.step(number, version))
            with self.phases.measure("sleep"):
                self.on_first(self.weights.sleep)
            if self.reinforce.updates == 1:
                with self.phases.measure("journal"):
                    self.on_first(lambda: self.journal.write(sampled.step))
        self.phases.seconds |= sampled.seconds
        self.lag = require_fresh(sampled.step, self.reinforce)
        if self.reinforce.updates > 1 and not sampled.step.old:
            sampled.step.old = self._log_probs_before(context, sampled.step)
            self.on_first(lambda: self.journal.write(sampled.step))
        return sampled.step

    def on_train_step_start(self, context: Any) -> None:
        number, update = divmod(context.state.train_state.step, self.reinforce.updates)
        if self.current is None or self.current.number != number + 1:
            self.phases.seconds.clear()
            self.current = self.step(context, number + 1)
            self.policy_step.take()
        self.began = time.monotonic()
        self._give_batches(context, update)
        if self.signal:
            self.signal.shorten(context.optimizer)

    def on_train_step_end(self, context: Any) -> None:
        done = context.state.train_state.step + 1  # Bridge increments it later
        self.phases.seconds["train"] += time.monotonic() - self.began
        with self.phases.measure("signal"):
            signal = self._measure_signal(context, done)
        self.policy_step.replay.end()
        if done % self.reinforce.updates == 0:
            self._report(done, self._figures() | signal)

    def on_data_init_start(self, context: Any) -> None:
        """Count steps from 0 if the policy comes from a training, whose checkpoint has its own count."""
        if self.from_training:
            context.state.train_state = TrainState()

    def on_train_start(self, context: Any) -> None:
        if self.run.train.precision != "fp32":
            exact_logits.install(context.model)
        self.weights.temperature.install(context.model)
        if self.reinforce.replay_experts:
            self.policy_step.replay.install(context.model)
        self.on_first(lambda: self.sampler.rollouts.ready())
        done = context.state.train_state.step
        if self.signal and (state := self.on_first(lambda: self.journal.noted(_signal_name(done)))):
            self.signal.resume(state)
        # Only before the first step: later the initial policy no longer exists, even if its result was removed.
        if self.held_out and not done and self.on_first(lambda: self.journal.noted("before") is None):
            self.weights.send(context, 0)
            self.on_first(lambda: self.journal.note("before", {"exact_match": self.sampler.greedy(self.held_out)}))

    def on_checkpoint_save(self, context: Any) -> None:
        """Evaluate the last weights on the held-out rows before their checkpoint is marked complete."""
        step = context.state.train_state.step
        if step != last_step(self.run) or not self.held_out:
            return
        self.weights.send(context, step)
        self.on_first(self._write_result)

    def _sampled_ahead(self, context: Any, number: int) -> Sampled:
        """The step that was sampled during earlier ones. vLLM gets new weights if the sampling thread needs them."""
        version = context.state.train_state.step
        with self.phases.measure("wait"):
            sampled = self.on_first(lambda: self.ahead.take(number))
        if self.on_first(lambda: self.ahead.needs(version)):
            self.weights.send(context, version)
            self.on_first(lambda: self.ahead.begin(version))
        with self.phases.measure("wait"):
            return sampled or self.on_first(lambda: self.ahead.take(number))

    def _scored(self, step: Step) -> list[list[Scored]]:
        """Answers of each optimizer step, with their advantages."""
        scored = [
            Scored(group.prompt, answer.tokens, answer.log_probs, advantage, None, None, answer.routes)
            for group in step.groups
            for answer, advantage in zip(
                group.answers, advantages.of_group(group.rewards, self.reinforce.loss), strict=True
            )
        ]
        size = len(scored) // self.reinforce.updates
        if step.old:
            scored = [replace(answer, old=old) for answer, old in zip(scored, step.old, strict=True)]
        return [scored[start : start + size] for start in range(0, len(scored), size)]

    def _log_probs_before(self, context: Any, step: Step) -> list[list[float]]:
        """Log-probabilities of all answers by the policy before the first of several updates, on every rank."""
        of_answers: list[list[float]] = []
        for answers in self._scored(step):
            of_ranks = gather(log_probs(self.run, context, self.policy_step, answers))
            merged = {number: values for share in of_ranks for number, values in share.items()}
            of_answers += [merged[number] for number in range(len(answers))]
        return of_answers

    def _give_batches(self, context: Any, update: int) -> None:
        """Give Bridge the micro batches of the next optimizer step."""
        answers = self._scored(self.current)[update]
        if self.reinforce.kl:
            with context.state.cfg.peft.disable_adapter(context.model):
                reference = log_probs(self.run, context, self.policy_step, answers)
            answers = [replace(answer, reference=reference.get(number)) for number, answer in enumerate(answers)]
        self.policy_step.begin(answers)
        batches, form = batches_of_rank(self.run, answers), Form.of(self.run)
        positions = len(batches) * parallel_state.get_data_parallel_world_size() * form.rows * form.length
        self.metrics.counted = sum(len(scored.prompt) + len(scored.answer) - 1 for scored in answers), positions
        self.feed.give(batches)

    def _measure_signal(self, context: Any, done: int) -> dict[str, float]:
        """Figures on the agreement of this optimizer step's gradient with earlier ones."""
        if self.signal is None:
            return {}
        length, cosine = self.signal.length, 0.0
        if not context.skipped_iter:
            cosine = cosine_with_mean(context.optimizer, self.run.optimizer.beta1)
            self.signal.add(cosine)
        self.on_first(lambda: self.journal.note(_signal_name(done), self.signal.state()))
        if done == WARN_AT and self.signal.value < 1:
            say(
                f"reinforce.reward: the gradients of the first {done} optimizer steps agree no more than noise "
                f"({self.signal.value:.1f} deviations): rewards may not depend on the answers, or "
                "reinforce.prompts and reinforce.samples are too small to show it"
            )
        return {"gradient_cosine": cosine, "gradient_signal": self.signal.value, "step_length": length}

    def _figures(self) -> dict[str, float]:
        """Figures of all ranks. Each rank of the last pipeline stage computes the same losses."""
        figures: dict[str, float] = {}
        for of_rank in gather(self.policy_step.take()):
            add_figures(figures, of_rank)
        tokens = max(1.0, figures.pop("tokens"))
        return {key: value if key == LARGEST else value / tokens for key, value in figures.items()}

    def _report(self, done: int, figures: dict[str, float]) -> None:
        """Write the step's line, and end the run if further steps would be useless."""
        now, seconds = time.monotonic(), self.phases.seconds
        if self.reported is not None:  # the rest is the previous report, and Megatron-Bridge's work between steps
            measured = sum(value for name, value in seconds.items() if name != "export")  # export is part of transfer
            seconds["rest"] = now - self.reported - measured
        self.reported = now
        line = self.report.line(self.current, done, self.lag, figures, seconds)
        line |= self.weights.figures() if "transfer" in seconds else {}
        line |= {"engines": self.on_first(lambda: len(self.sampler.rollouts.engines))}
        self.metrics.write(line)
        self.report.show(self.current, line, seconds)
        self.on_first(lambda: add_to_table(self.output, self.current, self.template, self.rows))
        self.report.require_progress(self.current, line)

    def _write_result(self) -> None:
        before = (self.journal.noted("before") or {}).get("exact_match")
        after = self.sampler.greedy(self.held_out)
        facts = {"steps": self.reinforce.steps, "held_out": len(self.held_out), "after": after}
        facts |= {} if before is None else {"before": before}
        write_atomically(self.output / RESULT, json.dumps(facts), durable=True)
        self.metrics.write({"kind": "held_out", "step": last_step(self.run), "time": time.time(), "exact_match": after})
        shown = "unknown" if before is None else f"{before:.3f}"
        say(f"held out: greedy exact match {shown} before, {after:.3f} after, of {len(self.held_out)} rows")


def _signal_name(done: int) -> str:
    """Name of the journal's note on the gradient signal after this many optimizer steps."""
    return f"signal-{done:06d}"
