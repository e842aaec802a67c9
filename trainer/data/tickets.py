"""Tickets to a shop and the team that each belongs to: a task that the tiny model learns in half a minute.

    python -m trainer.data.tickets OUT.jsonl [--rows N] [--seed N]

Each row is a customer's sentence among a name, an order number and a greeting that differ from row to row; no row
occurs twice. A model that has not seen the task names none of the teams. Equal arguments give equal bytes.
"""

import argparse
import json
import random
from pathlib import Path

TEAMS = {
    "billing": ["the invoice shows a wrong amount", "I was charged twice", "my card was declined", "the tax is wrong"],
    "shipping": [
        "the parcel has not arrived",
        "the courier went to a wrong door",
        "it is late",
        "tracking stands still",
    ],
    "returns": ["I want to send it back", "the refund is missing", "it broke after a day", "I got the wrong size"],
    "accounts": ["I cannot log in", "my password does not work", "please change my address", "delete my profile"],
    "sales": ["is there a discount for ten", "when is it in stock", "can I have a quote", "is there a larger model"],
}
NAMES = [
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ivo",
    "Jana",
    "Kai",
    "Lea",
    "Max",
    "Nina",
    "Otto",
    "Pia",
]
GREETINGS = ["Thanks", "Best", "Yours", "Regards"]


def tickets(rows: int, seed: int) -> dict[str, str]:
    """Tickets, and the team of each."""
    rng = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < rows:
        team = rng.choice(list(TEAMS))
        text, name, order = rng.choice(TEAMS[team]), rng.choice(NAMES), rng.randrange(1000, 10000)
        if rng.random() < 0.5:
            ticket = f"{name} writes: {text}, order {order}."
        else:
            ticket = f"Order {order}: {text}. {rng.choice(GREETINGS)}, {name}"
        found[f"{ticket} Team:"] = team
    return found


def with_mistakes(found: dict[str, str], seed: int, right: float = 0.3) -> dict[str, str]:
    """The same tickets, with the next team in the place of the right one in most of them.

    A model that has learned these knows the teams' names, and gives each ticket to the wrong one where it is sure. What
    rewards teach it then shows in greedy answers as well (conf/tiny-rl.yaml).
    """
    rng, teams = random.Random(seed), list(TEAMS)
    return {
        ticket: team if rng.random() < right else teams[(teams.index(team) + 1) % len(teams)]
        for ticket, team in found.items()
    }


def with_worse(found: dict[str, str], seed: int) -> list[dict[str, str]]:
    """The same tickets as comparisons: the right team is chosen, and any other rejected."""
    rng = random.Random(seed)
    return [
        {"prompt": ticket, "chosen": team, "rejected": rng.choice([one for one in TEAMS if one != team])}
        for ticket, team in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.data.tickets", description="Tickets and their teams.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = tickets(options.rows, options.seed).items()
    try:
        with options.out.open("x") as file:
            file.writelines(json.dumps({"input": ticket, "output": team}) + "\n" for ticket, team in rows)
    except OSError as error:
        parser.error(f"{options.out}: {error.strerror}; name a new file")


if __name__ == "__main__":
    main()
