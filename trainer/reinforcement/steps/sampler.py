"""Sampling of a step with vLLM, the environment and the rewards: which prompts are drawn, and their answers.

It runs on rank 0. It does not depend on the training, and may run at the same time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from conf.schema.run import Run
from contract.faults import Fault
from trainer.data.rows import Row
from trainer.data.tokens.templates import Template
from trainer.reinforcement import probe, rewards
from trainer.reinforcement.guarded.environment import Environment
from trainer.reinforcement.guarded.worker import Question
from trainer.reinforcement.policy import advantages
from trainer.reinforcement.rollouts import Answered, Rollouts
from trainer.reinforcement.samples import Answer, Group, Step
from trainer.reinforcement.steps.phases import Phases


@dataclass(frozen=True)
class Sampled:
    """A step to train on, and the seconds of each sampling phase (empty if the step was read from the journal)."""

    step: Step
    seconds: dict[str, float]


@dataclass(frozen=True)
class Probed:
    """Results of one engine for the probe."""

    version: int
    read: list[list[float]]  # log-probabilities of the rows
    written: list[list[float]]  # log-probabilities of the tokens that it has written after each
    rows: list[list[int]]  # with the written tokens


class Sampler:
    """Engines, environment and rewards of a run."""

    def __init__(self, run: Run, rollouts: Rollouts, template: Template, rows: list[Row], file: Path):
        self.run, self.reinforce, self.rollouts, self.template, self.rows = run, run.reinforce, rollouts, template, rows
        require_fit(run, (len(self._prompt(row)) for row in rows), file)
        rewards.require_references(run, map(template.reference, rows), file)
        self.reward = rewards.make(run)
        self.environment = Environment(run, template) if self.reinforce.environment else None

    def step(self, number: int, version: int) -> Sampled:
        """Draw prompts for this step and answer them with vLLM's current weights.

        Groups without a signal are replaced in further rounds, up to reinforce.rounds.
        """
        phases, drawn, chosen = Phases(), 0, list[Group]()
        for round in range(self.reinforce.rounds):
            missing = self.reinforce.prompts - len(chosen)
            if not missing:
                break
            with phases.measure("generate"):
                groups = self._groups(number, round, missing)
            drawn += missing
            with phases.measure("reward"):
                self._reward(groups)
            last = round + 1 == self.reinforce.rounds
            chosen += [group for group in groups if last or advantages.has_signal(group.rewards)]
        return Sampled(Step(number, version, chosen, drawn), phases.seconds)

    def probe(self, rows: list[list[int]]) -> list[Probed]:
        """Make each engine read the probe's rows, and write tokens after them. Return the results."""
        read = self.rollouts.each("score", rows=rows)
        # With temperature 1, log-probabilities are the model's own.
        sampling = {"n": 1, "max_tokens": probe.WRITTEN, "temperature": 1.0, "ignore_eos": True}
        seeds = [self.reinforce.seed + number for number in range(len(rows))]
        results = []
        for engine, answers in self.rollouts.each("answer", prompts=rows, seeds=seeds, **sampling).items():
            probe.require_same_prompts(rows, [prompt for prompt, _ in answers])
            written = [output for _, (output,) in answers]
            whole = [row + tokens for row, (tokens, *_) in zip(rows, written, strict=True)]
            results.append(Probed(engine.version, read[engine], [values for _, values, *_ in written], whole))
        return results

    def greedy(self, held_out: list[Row]) -> float:
        """Share of these rows with a correct answer, without sampling."""
        prompts = [self._prompt(row)[-longest_prompt(self.run) :] for row in held_out]
        answers = self._ask(prompts, None, n=1, temperature=0.0, **self._limits())
        pairs = zip(prompts, answers, strict=True)
        groups = [Group(number, prompt, of_prompt) for number, (prompt, of_prompt) in enumerate(pairs)]
        self._play(groups, held_out, Random(self.reinforce.seed), temperature=0.0)
        correct = [rewards.exact(self._question(held_out[group.row], group.answers[0].text)) for group in groups]
        return sum(correct) / max(1, len(correct))

    def _groups(self, number: int, round: int, count: int) -> list[Group]:
        chosen, seeds = draw(self.run, number, round, count, len(self.rows))
        prompts = [self._prompt(self.rows[row]) for row in chosen]
        temperature = self.reinforce.temperature
        answers = self._ask(prompts, seeds, n=self.reinforce.samples, temperature=temperature, **self._limits())
        groups = [Group(*group) for group in zip(chosen, prompts, answers, strict=True)]
        turns = Random(f"{self.reinforce.seed} {number} {round} turns")  # seeds of later answers
        self._play(groups, self.rows, turns, temperature=temperature)
        return groups

    def _play(self, groups: list[Group], rows: list[Row], seeds: Random, **sampling: Any) -> None:
        """Play the turns after the first answers, if the run has an environment."""
        if self.environment is None:
            return

        def texts_of(group: Group) -> tuple[str, str]:
            return self.template.prompt(rows[group.row]), self.template.reference(rows[group.row])

        def ask(prompts: list[list[int]], seeds: list[int], limits: list[int]) -> list[Answer]:
            answers = self._ask(prompts, seeds, n=1, **sampling | self._limits() | {"max_tokens": limits})
            return [answer for (answer,) in answers]

        self.environment.play(groups, texts_of, ask, seeds)

    def _ask(self, prompts: list[list[int]], seeds: list[int] | None, **sampling: Any) -> list[list[Answer]]:
        """Answers to each prompt, after a check that vLLM has read the same prompts."""
        answers = self.rollouts.answer(prompts, seeds, **sampling)
        probe.require_same_prompts(prompts, [read for read, *_ in answers])
        return [_answers(answered) for answered in answers]

    def _limits(self) -> dict[str, Any]:
        return {"max_tokens": self.reinforce.max_tokens, "stop": self.template.ends_by_text}

    def _prompt(self, row: Row) -> list[int]:
        prompt, _ = self.template.tokens(row)
        return prompt

    def _reward(self, groups: list[Group]) -> None:
        answers = [(self.rows[group.row], answer) for group in groups for answer in group.answers]
        questions = [self._question(row, answer.text) for row, answer in answers]
        values = self.reward(questions)
        rewards.require_finite(values, questions)
        longest, buffer = self.reinforce.max_tokens, self.reinforce.overlong
        for (_, answer), value in zip(answers, values, strict=True):
            answer.reward = value + advantages.overlong(len(answer.tokens), longest, buffer)

    def _question(self, row: Row, text: str) -> Question:
        answer = self.template.without_end(text)
        return Question(self.template.prompt(row), answer, self.template.reference(row))


def _answers(answered: Answered) -> list[Answer]:
    _, outputs, version = answered
    return [
        Answer(tokens, log_probs, text, ended, routes=routes, version=version)
        for tokens, log_probs, text, ended, routes in outputs
    ]


def longest_prompt(run: Run) -> int:
    """Highest number of tokens of a prompt that leaves room for the longest answer."""
    return run.data.seq_length - run.reinforce.max_tokens


def require_fit(run: Run, lengths: Iterable[int], path: Path) -> None:
    """Raise a Fault if a row of the file has a prompt of too many tokens."""
    long = [(length, row) for row, length in enumerate(lengths, 1) if length > longest_prompt(run)]
    if not long:
        return
    length, row = long[0]
    others = f", and {len(long) - 1} more are too long; the longest has {max(long)[0]}" if len(long) > 1 else ""
    raise Fault(
        f"{path}:{row}: a prompt of {length} tokens{others}; data.seq_length {run.data.seq_length} less "
        f"reinforce.max_tokens {run.reinforce.max_tokens} leaves {longest_prompt(run)}"
    )


def draw(run: Run, step: int, round: int, count: int, of: int) -> tuple[list[int], list[int]]:
    """Numbers of the rows of a round of a step, and a seed for the answers to each."""
    random = Random(f"{run.reinforce.seed} {step} {round}")
    chosen = random.sample(range(of), count) if count <= of else random.choices(range(of), k=count)
    return chosen, [random.randrange(2**40) for _ in chosen]
