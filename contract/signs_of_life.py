"""Signs of life of a rank: files that it writes once a second, and that whoever watches it on its host reads.

FOLDER, in the environment of a rank, names their folder. rank<N>.json holds rank, pid, phase, the last step, how long
the usual step takes, and the moments of all this by the host's monotonic clock. error<N>.json is what a rank dies of,
by its own account.
"""

FOLDER = "LIFE_FOLDER"
MEASURED = ("training", "answering")  # phases whose usual step a rank knows
OVER = "over"  # the phase of a rank that has made all that it was to make


def sign(rank: int | str) -> str:
    return f"rank{rank}.json"


def error(rank: int | str) -> str:
    return f"error{rank}.json"
