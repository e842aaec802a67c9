"""Synthetic texts for models trained from scratch: short stories whose sentences depend on one another.

    python -m trainer.data.made_texts OUT.jsonl [--rows N] [--seed N]

Person, place and object stay the same through a story, so a model with attention predicts it better than one that
counts words. Equal arguments give equal bytes.
"""

import random

from trainer.data.tickets import NAMES, WORDS, command

PLACES, THINGS, MOODS, TIMES = (WORDS[kind] for kind in ("places", "things", "moods", "times"))


def stories(rows: int, seed: int) -> list[dict[str, str]]:
    """Return rows with distinct stories."""
    rng = random.Random(seed)
    texts: dict[str, None] = {}
    while len(texts) < rows:
        texts[_story(rng)] = None
    return [{"text": text} for text in texts]


def _story(rng: random.Random) -> str:
    first, second = rng.sample(NAMES, 2)
    here, there = rng.sample(PLACES, 2)
    thing = rng.choice(list(THINGS))
    what, mood, when = rng.choice(THINGS[thing]), rng.choice(list(MOODS)), rng.choice(TIMES)
    count = rng.randrange(2, 20)
    lines = [
        f"{first} goes to the {here} {when}.",
        f"There {first} finds a {thing} with {count} {what}.",
        f"{first} is {mood} and {MOODS[mood]}.",
        f"{second} comes from the {there} and asks: whose {thing} is this?",
        f"It is not mine, says {first}, it was here {when}.",
        f"They count the {what} and find {count} of them.",
        f"Then {first} takes the {thing} from the {here} to the {there}, and {second} helps.",
    ]
    kept = lines[:2] + [line for line in lines[2:-1] if rng.random() < 0.7] + lines[-1:]
    return " ".join(kept)


if __name__ == "__main__":
    command("trainer.data.made_texts", "Stories made by rules.", 2000, stories)
