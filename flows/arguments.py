"""Common parts of the command lines: a run's configuration with overrides, and a fault in lines of its own."""

# pyright: reportArgumentType=false

import argparse
import sys

from contract.faults import line_of


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        usage=argparse.SUPPRESS,  # a fault is one line
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def of_a_run(
    module: str, description: str | None, example: str, names: str = "a name in conf/", required: bool = True
) -> argparse.ArgumentParser:
    """Make a parser for NAME [KEY=VALUE ...]; parse_intermixed_args lets options stand anywhere among them."""
    made = parser(module, description)
    optional = {} if required else {"nargs": "?"}
    made.add_argument("conf", metavar="NAME", help=f"{names}, or a YAML file", **optional)
    made.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=f"such as {example}")
    return made


def refused(fault: object, code: int = 2) -> int:
    """Print a fault. Returns the exit code, 2 for one that the caller can mend."""
    print("".join(f"error: {line}\n" for line in str(fault).splitlines()), end="", file=sys.stderr)
    return code


def refused_or_raised(error: Exception) -> int:
    """Print a fault, or what the host refuses, as where a disk is full. Raise a defect of this program again."""
    line = line_of(error)
    if line is None:
        raise error
    return refused(line)
