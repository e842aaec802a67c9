"""Signs of life of a rank: files that it writes once a second, for the process that watches it on its host.

The environment variable FOLDER names their folder. rank<N>.json has rank, pid, phase, the last step, the usual duration
of a step, and the times of these values by the host's monotonic clock. error<N>.json has the error that ends a rank.

JOURNAL is in paths.output of a training, and is never shortened. Rank 0 appends a line at the start (with start, and
attempt in a gang), after each step and after each save (with saved): time, step, seconds since the last line by phase.

MODULES lists the modules that the first rank of a host has imported when its first step ends.
"""

JOURNAL = "phases.jsonl"
MODULES = "modules.json"
FOLDER = "LIFE_FOLDER"
MEASURED = ("training", "answering")  # phases with a usual duration of a step
OVER = "over"  # the phase of a rank that has finished its work


def sign(rank: int | str) -> str:
    return f"rank{rank}.json"


def error(rank: int | str) -> str:
    return f"error{rank}.json"
