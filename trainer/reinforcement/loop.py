"""The steps of a reinforcement learning, as a callback of Megatron-Bridge's loop: before each of its steps there is
something to train on.

    weights to vLLM -> probe -> answers -> rewards -> journal -> the loop's own step

What only one process can do, rank 0 does: it has vLLM, the rewards and the journal. The others hear the outcome, so
that a fault ends all of them alike.
"""

# pyright: reportOptionalMemberAccess=false, reportOptionalCall=false, reportArgumentType=false

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.state import TrainState
from megatron.core import parallel_state
from torch import distributed

from conf.rules.reinforcement import without_signal
from conf.schema.run import Run
from contract.faults import Fault
from contract.files import write_atomically
from trainer.data.rows import Row
from trainer.megatron.recipe import last_step
from trainer.reinforcement import advantages, draw, probe, rewards
from trainer.reinforcement.batches import Form, micro_batches
from trainer.reinforcement.guarded.environment import Environment
from trainer.reinforcement.guarded.worker import Question
from trainer.reinforcement.journal import Journal
from trainer.reinforcement.policy_step import LARGEST, Feed, PolicyStep, Temperature
from trainer.reinforcement.policy_step import log_probs as log_probs_of_answers
from trainer.reinforcement.rollouts import Rollouts
from trainer.reinforcement.samples import Answer, Group, Scored, Step
from trainer.serving import prompts
from trainer.startup import device
from trainer.startup.console import say
from trainer.training.gradient_signal import GradientSignal
from trainer.training.gradients import cosine_with_mean
from trainer.training.metrics import Metrics
from trainer.training.parity import log_probs

RESULT = "reinforced.json"
SHOWN = 4  # samples in the table of a step
UNHEARD = 20  # optimizer steps after which gradients that are nothing but noise are told of
MISMATCH = 4  # times the probe's bound: of a step's own samples, which are more than the probe's rows
TABLE = "samples.jsonl"


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
        self.without_signal = 0
        self.signal = None if without_signal(run) else GradientSignal(self.asked.signal)
        self.seconds: dict[str, float] = {}
        self.in_use: dict[str, int] = {}  # bytes of the GPU, while vLLM is awake and while it sleeps
        self.tasks: list[Any] | None = None  # how Bridge makes released tensors of Megatron's
        self.reward, self.environment = None, None
        if rollouts:
            draw.require_fit(run, (len(self._prompt(row)) for row in self.rows), folder / "training.jsonl")
            self.reward = rewards.make(run)
            self.environment = self._environment()
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
        self.temperature.install(context.model)
        if self.asked.replay_experts:
            self.policy_step.replay.install(context.model)
        self._on_first(lambda: self.rollouts.ready())
        done = context.state.train_state.step
        if self.signal and done:
            self.signal.resume(self._on_first(lambda: self._signal_after(done)))
        if self.held_out and self._on_first(lambda: self.journal.noted("before") is None):
            self._transfer(context, 0)
            self._on_first(lambda: self.journal.note("before", {"exact_match": self._greedy()}))

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
        """The step from the journal, or made now and written there."""
        found = self._on_first(lambda: self.journal.read(number))
        if found is not None:
            self._on_first(self._sleep)
            say(f"step {number}: trained on the answers in {self.journal.folder}")
            return found
        version = context.state.train_state.step
        self._transfer(context, version)
        step = self._on_first(lambda: self._sample(number, version))
        start = time.monotonic()
        self._on_first(self._sleep)
        self.seconds["sleep"] = time.monotonic() - start
        if self.asked.updates > 1:
            step.old = self._old(context, step)
        self._on_first(lambda: self.journal.write(step))
        return step

    def _transfer(self, context: Any, version: int) -> None:
        """Give vLLM the weights as they are, and look whether it computes with them."""
        start = time.monotonic()
        if self.asked.transport == "adapter":
            self.sent = self._adapter(context, version)
        else:
            tensors = self._weights(context)
            self.sent = self._on_first(lambda: self.rollouts.update(tensors, version), tensors)
        self.seconds["transfer"] = time.monotonic() - start
        start = time.monotonic()
        self._probe(context, version)
        self.seconds["probe"] = time.monotonic() - start

    def _weights(self, context: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors as released, one after another. Every rank has to take all of them."""
        start, self.seconds["export"] = time.monotonic(), 0.0
        if self.tasks is None:
            self.tasks = self.bridge.get_conversion_tasks(context.model)
        given = {"conversion_tasks": self.tasks, "cpu": False, "show_progress": False}
        for weight in self.bridge.export_hf_weights(context.model, **given):
            self.seconds["export"] += time.monotonic() - start
            yield weight.param_name, weight.weight
            start = time.monotonic()

    def _sleep(self) -> None:
        """Leave the GPU to the training."""
        self.in_use["awake"] = device.memory_in_use()
        self.rollouts.sleep()
        self.in_use["asleep"] = device.memory_in_use()

    def _adapter(self, context: Any, version: int) -> int:
        """Give vLLM the adapter alone. Every rank has a part of it, and the first one writes it."""
        with tempfile.TemporaryDirectory(prefix="rollout-", dir="/dev/shm") as folder:
            adapter = context.state.cfg.peft
            self.bridge.save_hf_adapter(context.model, folder, adapter, self.run.paths.model, show_progress=False)
            return self._on_first(lambda: self.rollouts.adapt(folder, version))

    def _probe(self, context: Any, version: int) -> None:
        read, written, rows = self._on_first(self._ask_probe)
        with self.temperature.off():
            found = log_probs(self.run, context, rows)
        known = [len(row) - probe.WRITTEN - 1 for row in rows]
        said = [one[:count] for one, count in zip(found, known, strict=True)]
        behind = [one[count : count + probe.WRITTEN] for one, count in zip(found, known, strict=True)]
        differences = probe.Differences(probe.mean(read, said), probe.mean(written, behind))
        before = probe.mean(read, self.said) if self.said and self.said != said else None
        self.said, self.apart = said, max(differences.read, differences.written)
        # Copies of the model may differ in the last bit: one of them judges for all.
        self._on_first(
            lambda: probe.judge(differences, probe.bound(self.run), before, (self.rollouts.version, version))
        )

    def _ask_probe(self) -> tuple[list[list[float]], list[list[float]], list[list[int]]]:
        """Log-probabilities of the rows and of tokens that vLLM writes behind each, and the rows with these tokens."""
        read = self.rollouts.call("score", rows=self.probe_rows)
        # At a temperature of 1, log-probabilities are those of the model itself.
        sampling = {"n": 1, "max_tokens": probe.WRITTEN, "temperature": 1.0, "ignore_eos": True}
        seeds = [self.asked.seed + number for number in range(len(self.probe_rows))]
        answers = [one for (one,) in self._ask(self.probe_rows, seeds, **sampling)]
        rows = [row + tokens for row, (tokens, *_) in zip(self.probe_rows, answers, strict=True)]
        return read, [found for _, found, *_ in answers], rows

    def _sample(self, number: int, version: int) -> Step:
        """Answers to prompts that are drawn for this step, and what they are worth."""
        start, drawn, kept = time.monotonic(), 0, []
        spent = 0.0
        for round in range(self.asked.rounds):
            missing = self.asked.prompts - len(kept)
            if not missing:
                break
            groups = self._groups(number, round, missing)
            drawn += missing
            began = time.monotonic()
            self._reward(groups)
            spent += time.monotonic() - began
            last = round + 1 == self.asked.rounds
            kept += [group for group in groups if last or advantages.has_signal(group.rewards)]
        self.seconds |= {"generate": time.monotonic() - start - spent, "reward": spent}
        return Step(number, version, kept, drawn)

    def _groups(self, number: int, round: int, count: int) -> list[Group]:
        chosen, seeds = draw.rows(self.run, number, round, count, len(self.rows))
        asked = [self._prompt(self.rows[row]) for row in chosen]
        sampling = {"n": self.asked.samples, "temperature": self.asked.temperature}
        answers = self._ask(asked, seeds, **sampling | self._limits())
        groups = [
            Group(row, prompt, [_answer(*one) for one in found])
            for row, prompt, found in zip(chosen, asked, answers, strict=True)
        ]
        self._play(groups, self.rows, draw.of_turns(self.run, number, round), temperature=self.asked.temperature)
        return groups

    def _environment(self) -> Environment | None:
        if not self.asked.environment:
            return None
        tokenizer = self.template.tokenizer
        return Environment(
            self.run, lambda text: tokenizer.encode(text, add_special_tokens=False), self.template.without_end
        )

    def _play(self, groups: list[Group], rows: list[Row], seeds: Random, **sampling: Any) -> None:
        """Take the turns behind the first answers, where an environment replies to them."""
        if self.environment is None:
            return

        def said(group: Group) -> tuple[str, str]:
            return self.template.prompt(rows[group.row]), self.template.reference(rows[group.row])

        def ask(prompts: list[list[int]], seeds: list[int], limits: list[int]) -> list[Answer]:
            answers = self._ask(prompts, seeds, n=1, **sampling | self._limits() | {"max_tokens": limits})
            return [_answer(*one) for (one,) in answers]

        self.environment.play(groups, said, ask, seeds)

    def _ask(self, asked: list[list[int]], seeds: list[int] | None, **sampling: Any) -> list[list[tuple]]:
        """Answers to each prompt, once it is known that vLLM has read that prompt and no other."""
        answers = self.rollouts.call("answer", prompts=asked, seeds=seeds, **sampling)
        probe.require_same_prompts(asked, [read for read, _ in answers])
        return [found for _, found in answers]

    def _limits(self) -> dict[str, Any]:
        return {"max_tokens": self.asked.max_tokens, "stop": self.template.ends_by_text}

    def _prompt(self, row: Row) -> list[int]:
        prompt, _ = self.template.tokens(row)
        return prompt

    def _reward(self, groups: list[Group]) -> None:
        answers = [(self.rows[group.row], answer) for group in groups for answer in group.answers]
        questions = [self._question(row, answer.text) for row, answer in answers]
        found = self.reward(questions)
        rewards.require_finite(found, questions)
        for (_, answer), value in zip(answers, found, strict=True):
            answer.reward = value + advantages.overlong(len(answer.tokens), self.asked.max_tokens, self.asked.overlong)

    def _question(self, row: Row, text: str) -> Question:
        answer = self.template.without_end(text)
        return Question(self.template.prompt(row), answer, self.template.reference(row))

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
        self.feed.give(self._micro_batches(answers))

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
        step, limit = self.step, MISMATCH * probe.bound(self.run)
        answers = [answer for group in step.groups for answer in group.answers]
        values = [answer.reward for answer in answers]
        lengths = [len(answer.tokens) for answer in answers]
        signal = sum(advantages.has_signal(group.rewards) for group in step.groups)
        line: dict[str, Any] = {"kind": "reinforce", "step": done, "time": time.time(), "version": step.version}
        line |= {
            "reward": sum(values) / len(values),
            "reward_best": _mean([max(group.rewards) for group in step.groups]),
        }
        line |= {"groups_with_signal": signal / len(step.groups), "drawn": step.drawn}
        line |= {"entropy": -figures.pop("log_prob"), **figures}
        line |= {"length": _mean(lengths), "length_max": max(lengths)}
        line |= {"truncated": _mean([float(not answer.ended) for answer in answers])}
        line |= {f"seconds_{name}": value for name, value in self.seconds.items()}
        if "generate" in self.seconds:
            line |= {"probe": self.apart, "sent_mb": self.sent / 1e6}
            line |= {f"gpu_gb_{state}": size / 1e9 for state, size in self.in_use.items() if size}
            sampled = sum(answer.sampled for answer in answers)
            line |= {"generated_tokens_per_second": sampled / max(1e-9, self.seconds["generate"])}
        self.metrics.write(line)
        spent = ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items())
        say(
            f"reinforce {step.number}/{self.asked.steps}  reward {line['reward']:.3f}  groups with signal "
            f"{signal}/{len(step.groups)}  mismatch {line['mismatch']:.1e}  entropy {line['entropy']:.3f}  {spent} s"
        )
        self._on_first(lambda: self._table(step))
        self.without_signal = 0 if signal else self.without_signal + 1
        if not line["mismatch"] <= limit:
            raise Fault(
                f"step {step.number}: of its own samples vLLM and Megatron differ by {line['mismatch']:.3g} nats a "
                f"token, the bound is {limit:.3g} ({MISMATCH} times that of the probe): they do not compute the same "
                "policy"
            )
        if self.without_signal >= self.asked.patience:
            raise Fault(
                f"reinforce.reward: all answers to each prompt have been worth the same for {self.without_signal} "
                f"steps (the last ones {values[0]:g}), so that nothing is learned; reinforce.patience says how long to "
                "wait"
            )

    def _table(self, step: Step) -> None:
        shown = [
            {
                "step": step.number,
                "prompt": self.template.prompt(self.rows[group.row]),
                "answer": group.answers[0].text,
                "reference": self.template.reference(self.rows[group.row]),
                "reward": group.answers[0].reward,
            }
            for group in step.groups[:SHOWN]
        ]
        with (self.output / TABLE).open("a") as file:
            file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in shown)

    def _greedy(self) -> float:
        """Share of held-out rows that are answered right, without sampling."""
        asked = [self._prompt(row)[-draw.longest(self.run) :] for row in self.held_out]
        answers = self._ask(asked, None, n=1, temperature=0.0, **self._limits())
        groups = [
            Group(number, prompt, [_answer(*one) for one in found])
            for number, (prompt, found) in enumerate(zip(asked, answers, strict=True))
        ]
        self._play(groups, self.held_out, Random(self.asked.seed), temperature=0.0)
        return _mean([rewards.exact(self._question(self.held_out[one.row], one.answers[0].text)) for one in groups])

    def _result(self) -> None:
        before = (self.journal.noted("before") or {}).get("exact_match")
        after = self._greedy()
        facts = {"steps": self.asked.steps, "held_out": len(self.held_out), "before": before, "after": after}
        write_atomically(self.output / RESULT, json.dumps(facts), durable=True)
        self.metrics.write({"kind": "held_out", "step": last_step(self.run), "time": time.time(), "exact_match": after})
        say(f"held out: greedy exact match {before:.3f} before, {after:.3f} after, of {len(self.held_out)} rows")

    def _on_first(self, call: Callable[[], Any] | None, drained: Iterator[Any] | None = None) -> Any:
        """What rank 0 gets from the call, on every rank. `drained` is what the others have to go through meanwhile."""
        outcome: list[Any] = [None]
        if distributed.get_rank() == 0:
            assert call is not None
            try:
                outcome = [(True, call())]
            except Fault as fault:
                outcome = [(False, str(fault))]
                if drained is not None:
                    for _ in drained:  # the others wait for this rank in each tensor
                        pass
        elif drained is not None:
            for _ in drained:
                pass
        distributed.broadcast_object_list(outcome, src=0)
        well, found = outcome[0]
        if not well:
            raise Fault(found)
        return found


def _answer(tokens: list[int], log_probs: list[float | None], text: str, ended: bool, routes: str | None) -> Answer:
    return Answer(tokens, log_probs, text, ended, routes=routes)


def _noted(done: int) -> str:
    """Name in the journal of what gradients had in common after so many optimizer steps."""
    return f"signal-{done:06d}"


def _mean(values: list[Any]) -> float:
    return sum(values) / max(1, len(values))
