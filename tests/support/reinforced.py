"""What a reinforcement learning leaves behind, as tests compare it."""

import json
from pathlib import Path

# An adapter that vLLM can have as one.
ADAPTER = {"adapter.kind": "lora", "adapter.rank": 8, "adapter.targets": "[linear_qkv,linear_proj]"}


def answers(folder: Path) -> list[tuple[list, list[float]]]:
    """Tokens and rewards of every answer of each step."""
    found: list[tuple[list, list[float]]] = []
    for path in sorted((folder / "rollouts").glob("0*.json")):
        groups = json.loads(path.read_text())["groups"]
        all_of = [answer for group in groups for answer in group["answers"]]
        found.append(([answer["tokens"] for answer in all_of], [answer["reward"] for answer in all_of]))
    return found


def norms(folder: Path) -> dict[int, float]:
    """Norm of each step's gradient, as it was last computed."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["grad_norm"] for line in lines if line["kind"] == "train"}


def signals(folder: Path) -> dict[int, float]:
    """Signal in the gradients up to each step, as it was last computed."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["gradient_signal"] for line in lines if line["kind"] == "reinforce"}


def of_steps(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "reinforce"]
