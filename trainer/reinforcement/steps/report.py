"""Report on a step after its training, and the check whether further steps are useful."""

import json
import time
from math import inf
from pathlib import Path
from typing import Any

from conf.schema.run import Run
from contract.faults import Fault
from trainer.data.rows import Row
from trainer.data.tokens.templates import Template
from trainer.reinforcement import probe
from trainer.reinforcement.policy import advantages
from trainer.reinforcement.samples import Step
from trainer.startup.console import say

SHOWN = 4  # samples of a step in the table
MISMATCH = 4  # factor of the probe's bound, for a step's own samples, which are more than the probe's rows
TABLE = "samples.jsonl"


class Report:
    """Lines on a run's steps, and the number of consecutive steps without a signal."""

    def __init__(self, run: Run):
        self.run, self.reinforce, self.without_signal = run, run.reinforce, 0

    def line(self, step: Step, done: int, lag: float, figures: dict[str, float], seconds: dict[str, float]) -> dict:
        """Return the figures of a step. `lag` is the age, in steps, of the weights that sampled it."""
        values = [answer.reward for answer in step.answers]
        lengths = [len(answer.tokens) for answer in step.answers]
        line: dict[str, Any] = {"kind": "reinforce", "step": done, "time": time.time(), "version": step.version}
        line |= {"version_lag": lag}
        line |= {"reward": _mean(values), "reward_best": _mean([max(group.rewards) for group in step.groups])}
        line |= {"groups_with_signal": _signal(step) / len(step.groups), "drawn": step.drawn}
        line |= {"entropy": -figures["log_prob"], **{key: value for key, value in figures.items() if key != "log_prob"}}
        line |= {"length": _mean(lengths), "length_max": max(lengths)}
        line |= {"truncated": _mean([float(not answer.ended) for answer in step.answers])}
        line |= {f"seconds_{name}": value for name, value in seconds.items()}
        if "generate" in seconds:
            sampled = sum(answer.sampled for answer in step.answers)
            line |= {"generated_tokens_per_second": sampled / max(1e-9, seconds["generate"])}
        return line

    def show(self, step: Step, line: dict[str, Any], seconds: dict[str, float]) -> None:
        times = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        lag = f"version lag {line['version_lag']:g}  " if self.reinforce.staleness else ""
        say(
            f"reinforce {step.number}/{self.reinforce.steps}  reward {line['reward']:.3f}  groups with signal "
            f"{_signal(step)}/{len(step.groups)}  {lag}mismatch {line['mismatch']:.1e}  entropy {line['entropy']:.3f}  "
            f"{times} s"
        )

    def require_progress(self, step: Step, line: dict[str, Any]) -> None:
        """Raise a Fault if the step's samples are of another policy, or if too many steps had no signal.

        With older weights, samples are of another policy by design: then only the probe checks the weights.
        """
        self.without_signal = 0 if _signal(step) else self.without_signal + 1
        limit = inf if line["version_lag"] else MISMATCH * probe.bound(self.run)
        if not line["mismatch"] <= limit:
            raise Fault(
                f"step {step.number}: on its own samples vLLM and Megatron differ by {line['mismatch']:.3g} nats per "
                f"token, the bound is {limit:.3g} ({MISMATCH} times that of the probe): they do not compute the same "
                "policy"
            )
        if self.without_signal >= self.reinforce.patience:
            raise Fault(
                f"reinforce.reward: for {self.without_signal} steps, all answers to each prompt got the same reward "
                f"(the last ones {step.answers[0].reward:g}), and nothing is learned; reinforce.patience is the limit "
                "of such steps"
            )


def add_to_table(output: Path, step: Step, template: Template, rows: list[Row]) -> None:
    """Append some answers of a step to the table."""
    with (output / TABLE).open("a") as file:
        for group in step.groups[:SHOWN]:
            row, answer = rows[group.row], group.answers[0]
            line = {"step": step.number, "prompt": template.prompt(row), "answer": answer.text}
            line |= {"reference": template.reference(row), "reward": answer.reward}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _signal(step: Step) -> int:
    """Number of groups whose rewards differ."""
    return sum(advantages.has_signal(group.rewards) for group in step.groups)


def _mean(values: list[Any]) -> float:
    return sum(values) / max(1, len(values))
