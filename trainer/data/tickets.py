"""Synthetic data: tickets to a shop with the team for each, which the tiny model learns in half a minute.

    python -m trainer.data.tickets OUT.jsonl [--rows N] [--seed N]

Each row is a customer's sentence with a name, an order number and sometimes a greeting, which vary; no row occurs
twice. A model that has not seen the task names none of the teams. Equal arguments give equal bytes.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

WORDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text("utf-8"))
TEAMS, NAMES, GREETINGS = WORDS["teams"], WORDS["names"], WORDS["greetings"]


def tickets(rows: int, seed: int) -> dict[str, str]:
    """Return tickets, and the team of each."""
    rng = random.Random(seed)
    teams: dict[str, str] = {}
    while len(teams) < rows:
        team = rng.choice(list(TEAMS))
        text, name, order = rng.choice(TEAMS[team]), rng.choice(NAMES), rng.randrange(1000, 10000)
        if rng.random() < 0.5:
            ticket = f"{name} writes: {text}, order {order}."
        else:
            ticket = f"Order {order}: {text}. {rng.choice(GREETINGS)}, {name}"
        teams[f"{ticket} Team:"] = team
    return teams


def with_mistakes(right_teams: dict[str, str], seed: int, right: float = 0.3) -> dict[str, str]:
    """Return the same tickets, most of them with the next team instead of the right one.

    A model trained on these tickets knows the teams' names, and assigns most tickets to the wrong team. Reinforcement
    learning can then improve its greedy answers (conf/tiny-rl.yaml).
    """
    rng, teams = random.Random(seed), list(TEAMS)
    return {
        ticket: team if rng.random() < right else teams[(teams.index(team) + 1) % len(teams)]
        for ticket, team in right_teams.items()
    }


def with_worse(teams: dict[str, str], seed: int) -> list[dict[str, str]]:
    """Return the same tickets as comparisons: the right team is chosen, and another team is rejected."""
    rng = random.Random(seed)
    return [
        {"prompt": ticket, "chosen": team, "rejected": rng.choice([other for other in TEAMS if other != team])}
        for ticket, team in teams.items()
    ]


def pairs(teams: dict[str, str]) -> list[dict[str, str]]:
    return [{"input": ticket, "output": team} for ticket, team in teams.items()]


def command(module: str, description: str, count: int, make: Callable[[int, int], list[dict[str, str]]]) -> None:
    """Write make(rows, seed) to a new file. The options of the command line have `count` rows as their default."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = make(options.rows, options.seed)
    try:
        with options.out.open("x") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        parser.error(f"{options.out}: {error.strerror}; name a new file")


if __name__ == "__main__":
    command("trainer.data.tickets", "Tickets and their teams.", 1600, lambda rows, seed: pairs(tickets(rows, seed)))
