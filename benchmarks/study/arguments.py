"""Parser of the study. It imports nothing heavy, like those in flows/arguments.py."""

# pyright: reportArgumentType=false

import argparse
from pathlib import Path

from flows.arguments import of_a_run


def study() -> argparse.ArgumentParser:
    made = of_a_run("benchmarks.study", example="train.precision=bf16, for every layout")
    made.add_argument("--gpus", metavar="N", type=int, default=1, help="GPUs of a layout, or ranks on a CPU (1)")
    made.add_argument("--list", metavar="LIST", action="append", default=[], help="a list of the configuration (all)")
    made.add_argument("--only", metavar="ROW", action="append", default=[], help="one row of the lists, such as DP2")
    made.add_argument("--row", metavar="'NAME: KEY=VALUE ...'", action="append", default=[], help="measure this layout")
    made.add_argument("--steps", metavar="S", type=int, default=8, help="steps of a trial; two of them warm up (8)")
    made.add_argument("--layers", metavar="K", type=int, help="keep only K layers of the model")
    made.add_argument("--profile", action="store_true", help="also record a step of each layout")
    made.add_argument("--to", metavar="FOLDER", type=Path, help="folder of the report and its data (runs/study/NAME)")
    made.add_argument("--again", action="store_true", help="repeat stored measurements")
    made.add_argument("--report", action="store_true", help="write the report from stored measurements")
    made.add_argument("--track", action="store_true", help="log each layout as a run in MLflow")
    made.add_argument("--within", metavar="S", type=float, default=600.0, help="seconds that a trial may take (600)")
    made.add_argument("--minutes", metavar="M", type=float, help="start no trial after M minutes")
    return made
