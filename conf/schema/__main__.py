"""Print a run's keys, for people or for editors.

    python -m conf.schema            a table of all keys
    python -m conf.schema --json     the JSON schema, which editors use to complete and check conf/*.yaml
    python -m conf.schema --page     docs/reference/keys.md: tables in Markdown

The table is as wide as the terminal; make schema writes both files.
"""

import argparse
import shutil

from conf.schema.table import json_schema, markdown, table
from contract import closed_pipe


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m conf.schema", description="Print the keys of a run's YAML.")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print the JSON schema instead of a table")
    forms.add_argument("--page", action="store_true", help="print tables in Markdown instead of a table")
    options = parser.parse_args()
    if options.json:
        print(json_schema(), end="")
    elif options.page:
        print(markdown(), end="")
    else:
        print("\n".join(table(shutil.get_terminal_size((160, 50)).columns)))


if __name__ == "__main__":
    closed_pipe.run(main)
