"""Print a run's keys, for people or for editors.

    python -m conf.schema            a table of all keys
    python -m conf.schema --json     the JSON schema, which editors use to complete and check conf/*.yaml

The table is as wide as the terminal.
"""

import argparse
import shutil

from conf.schema.table import json_schema, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m conf.schema", description="Print the keys of a run's YAML.")
    parser.add_argument("--json", action="store_true", help="print the JSON schema instead of a table")
    if parser.parse_args().json:
        print(json_schema(), end="")
    else:
        print("\n".join(table(shutil.get_terminal_size((160, 50)).columns)))


if __name__ == "__main__":
    main()
