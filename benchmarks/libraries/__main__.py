"""Libraries compared with the code that replaces them here: a figure for each decision in docs/adr/.

    python -m benchmarks.libraries [ITEM ...]          make bench-libraries; all items: 4 minutes on 2 cores

This project's code and the library run alternately, and the medians are compared: a busy machine slows both. Transfers
to S3 are measured by benchmarks/store.py, gangs by benchmarks/gang_faults.py.
"""

import argparse
import os

from benchmarks.libraries import (
    bridge,
    hub,
    journal,
    json_array,
    machine,
    orchestration,
    packages,
    registry,
    yaml_traps,
)
from benchmarks.workspace import workspace

ITEMS = {
    "yaml": yaml_traps,
    "json": json_array,
    "hub": hub,
    "packages": packages,
    "registry": registry,
    "machine": machine,
    "journal": journal,
    "bridge": bridge,
    "prefect": orchestration,
}


def main() -> None:
    lines = [f"  {name:10} {(module.__doc__ or '').partition(chr(10))[0]}" for name, module in ITEMS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.libraries",
        description="Ours beside a library's, a figure for each.",
        epilog="\n".join(["items:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("items", metavar="ITEM", nargs="*", help="which; default: all")
    names = parser.parse_args().items or [*ITEMS]
    if unknown := [name for name in names if name not in ITEMS]:
        parser.error(f"{unknown[0]}: no item; there are {', '.join(ITEMS)}")
    for name in names:
        print(f"{name}: {(ITEMS[name].__doc__ or '').partition(chr(10))[0]}", flush=True)
        with workspace(name) as folder:
            ITEMS[name].measure(folder)
        print(flush=True)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
