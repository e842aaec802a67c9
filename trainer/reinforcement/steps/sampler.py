"""Sampling of a step: all that vLLM, environment and rewards do for it.

Rank 0 has it. It knows nothing of the training, so that it can work beside it.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from conf.schema.run import Run
from trainer.data.rows import Row
from trainer.data.tokens.templates import Template
from trainer.reinforcement import draw, probe, rewards
from trainer.reinforcement.guarded.environment import Environment
from trainer.reinforcement.guarded.worker import Question
from trainer.reinforcement.policy import advantages
from trainer.reinforcement.rollouts import Answered, Rollouts
from trainer.reinforcement.samples import Answer, Group, Step


@dataclass(frozen=True)
class Sampled:
    """A step that can be trained on, and seconds of what was done for it; none where the journal had it."""

    step: Step
    seconds: dict[str, float]


@dataclass(frozen=True)
class Heard:
    """Words of one engine to the probe."""

    version: int
    read: list[list[float]]  # log-probabilities of the rows
    written: list[list[float]]  # and of tokens that it has written behind each
    rows: list[list[int]]  # with these tokens


class Sampler:
    """Engines, environment and rewards of a run."""

    def __init__(self, run: Run, rollouts: Rollouts, template: Template, rows: list[Row], file: Path):
        self.run, self.asked, self.rollouts, self.template, self.rows = run, run.reinforce, rollouts, template, rows
        draw.require_fit(run, (len(self._prompt(row)) for row in rows), file)
        rewards.require_references(run, map(template.reference, rows), file)
        self.reward = rewards.make(run)
        self.environment = self._environment()

    def step(self, number: int, version: int) -> Sampled:
        """Draw prompts for this step, and have them answered by the weights that vLLM has now."""
        start, drawn, kept = time.monotonic(), 0, list[Group]()
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
        seconds = {"generate": time.monotonic() - start - spent, "reward": spent}
        return Sampled(Step(number, version, kept, drawn), seconds)

    def hear(self, rows: list[list[int]]) -> list[Heard]:
        """Ask each engine about the probe's rows."""
        read = self.rollouts.each("score", rows=rows)
        # At a temperature of 1, log-probabilities are those of the model itself.
        sampling = {"n": 1, "max_tokens": probe.WRITTEN, "temperature": 1.0, "ignore_eos": True}
        seeds = [self.asked.seed + number for number in range(len(rows))]
        found = []
        for engine, answers in self.rollouts.each("answer", prompts=rows, seeds=seeds, **sampling).items():
            probe.require_same_prompts(rows, [prompt for prompt, _ in answers])
            behind = [told for _, (told,) in answers]
            whole = [row + tokens for row, (tokens, *_) in zip(rows, behind, strict=True)]
            found.append(Heard(engine.version, read[engine], [values for _, values, *_ in behind], whole))
        return found

    def greedy(self, held_out: list[Row]) -> float:
        """Share of these rows that are answered right, without sampling."""
        asked = [self._prompt(row)[-draw.longest(self.run) :] for row in held_out]
        answers = self._ask(asked, None, n=1, temperature=0.0, **self._limits())
        groups = [
            Group(number, prompt, found) for number, (prompt, found) in enumerate(zip(asked, answers, strict=True))
        ]
        self._play(groups, held_out, Random(self.asked.seed), temperature=0.0)
        right = [rewards.exact(self._question(held_out[one.row], one.answers[0].text)) for one in groups]
        return sum(right) / max(1, len(right))

    def _groups(self, number: int, round: int, count: int) -> list[Group]:
        chosen, seeds = draw.rows(self.run, number, round, count, len(self.rows))
        asked = [self._prompt(self.rows[row]) for row in chosen]
        sampling = {"n": self.asked.samples, "temperature": self.asked.temperature}
        answers = self._ask(asked, seeds, **sampling | self._limits())
        groups = [Group(row, prompt, found) for row, prompt, found in zip(chosen, asked, answers, strict=True)]
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
            return [one for (one,) in answers]

        self.environment.play(groups, said, ask, seeds)

    def _ask(self, asked: list[list[int]], seeds: list[int] | None, **sampling: Any) -> list[list[Answer]]:
        """Answers to each prompt, once it is known that vLLM has read that prompt and no other."""
        answers = self.rollouts.answer(asked, seeds, **sampling)
        probe.require_same_prompts(asked, [read for read, *_ in answers])
        return [_answers(one) for one in answers]

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


def _answers(answered: Answered) -> list[Answer]:
    _, told, version = answered
    return [
        Answer(tokens, log_probs, text, ended, routes=routes, version=version)
        for tokens, log_probs, text, ended, routes in told
    ]
