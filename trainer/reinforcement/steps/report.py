"""Report of a step that was trained on, and whether there is sense in going on behind it."""

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

SHOWN = 4  # samples in the table of a step
MISMATCH = 4  # times the probe's bound: of a step's own samples, which are more than the probe's rows
TABLE = "samples.jsonl"


class Report:
    """A run's lines, and how many steps have taught nothing."""

    def __init__(self, run: Run):
        self.run, self.asked, self.without_signal = run, run.reinforce, 0

    def line(self, step: Step, done: int, lag: float, figures: dict[str, float], seconds: dict[str, float]) -> dict:
        """Figures of a step. `lag` is how many steps older than the policy the weights are that sampled it."""
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
        spent = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        lag = f"version lag {line['version_lag']:g}  " if self.asked.staleness else ""
        say(
            f"reinforce {step.number}/{self.asked.steps}  reward {line['reward']:.3f}  groups with signal "
            f"{_signal(step)}/{len(step.groups)}  {lag}mismatch {line['mismatch']:.1e}  entropy {line['entropy']:.3f}  "
            f"{spent} s"
        )

    def require_sense(self, step: Step, line: dict[str, Any]) -> None:
        """Raise a Fault where the step's samples are of another policy, or steps have long taught nothing.

        What an older policy has sampled is of another one, as it may be: only the probe can tell of that.
        """
        self.without_signal = 0 if _signal(step) else self.without_signal + 1
        limit = inf if line["version_lag"] else MISMATCH * probe.bound(self.run)
        if not line["mismatch"] <= limit:
            raise Fault(
                f"step {step.number}: of its own samples vLLM and Megatron differ by {line['mismatch']:.3g} nats a "
                f"token, the bound is {limit:.3g} ({MISMATCH} times that of the probe): they do not compute the same "
                "policy"
            )
        if self.without_signal >= self.asked.patience:
            raise Fault(
                f"reinforce.reward: all answers to each prompt have been worth the same for {self.without_signal} "
                f"steps (the last ones {step.answers[0].reward:g}), so that nothing is learned; reinforce.patience "
                "says how long to wait"
            )


def add_to_table(output: Path, step: Step, template: Template, rows: list[Row]) -> None:
    """Write some answers of a step behind those of the steps before."""
    shown = [
        {
            "step": step.number,
            "prompt": template.prompt(rows[group.row]),
            "answer": group.answers[0].text,
            "reference": template.reference(rows[group.row]),
            "reward": group.answers[0].reward,
        }
        for group in step.groups[:SHOWN]
    ]
    with (output / TABLE).open("a") as file:
        file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in shown)


def _signal(step: Step) -> int:
    """Groups of which some answers are worth more than others."""
    return sum(advantages.has_signal(group.rewards) for group in step.groups)


def _mean(values: list[Any]) -> float:
    return sum(values) / max(1, len(values))
