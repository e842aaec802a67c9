"""A kubectl whose cluster is a folder, TOY_CLUSTER: objects are files kind.json in it; deny.txt is what it answers."""

import os
import sys
from pathlib import Path

KINDS = {"jobsets": "jobset", "workloads.kueue.x-k8s.io": "workloads", "localqueues.kueue.x-k8s.io": "queues"}


def main() -> int:
    cluster = Path(os.environ["TOY_CLUSTER"])
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--context=")]
    with (cluster / "calls.txt").open("a") as calls:
        print(*arguments, file=calls)
    if (cluster / "deny.txt").exists():
        print((cluster / "deny.txt").read_text(), file=sys.stderr)
        return 1
    plain = [argument for argument in arguments if not argument.startswith("--")]
    if plain[0] == "create":
        if "--dry-run=server" not in arguments:
            (cluster / "jobset.json").write_text(sys.stdin.read())
        return 0
    path = cluster / f"{KINDS.get(plain[1], plain[1])}.json"
    if plain[0] == "delete":
        for kind in ("jobset", "pods"):
            (cluster / f"{kind}.json").unlink(missing_ok=True)
    elif path.exists():
        print(path.read_text())
    elif "--ignore-not-found" not in arguments:
        print(f"Error from server (NotFound): {plain[1]} {plain[-1]!r} not found", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
