"""A stage for tests, and a process that makes it: python tests/tasks/run/toy_stage.py STORE FOLDER MODE

MODE is what befalls it: well, slow (0.5 s of work), killed-before-the-record, or stopped (SIGSTOP when its work is
done, which is another than others'). Each making appends a line to FOLDER/makings.
"""

import os
import signal
import sys
import time
from pathlib import Path

from tasks.run import artifact, lease
from tasks.run.artifact import Artifact, Stage, Work
from tasks.store import Store, open_store

STAGE = Stage("toy", 1, {"size": 3, "optimizer": {"lr": 0.001}}, {"model": "0123456789abcdef"})


def get_or_make(
    store: Store, folder: Path, text: str = "made", then=lambda work: None, stage: Stage = STAGE, **more
) -> Artifact:
    def make(work: Work) -> dict:
        with (folder / "makings").open("a") as file:
            file.write(f"{stage.name}\n")
        (work.folder / "files/deep").mkdir(exist_ok=True)
        (work.folder / "files/deep/text").write_text(text)
        (work.folder / "files/constant").write_text("constant")
        then(work)
        return {"length": len(text)}

    return artifact.get_or_make(stage, store, make, folder / "work", say, {"flow": "toy"}, **more)


def makings(folder: Path) -> list[str]:
    path = folder / "makings"
    return path.read_text().split() if path.exists() else []


def say(text: str) -> None:
    print(text, flush=True)


def main(uri: str, folder: Path, mode: str) -> None:
    lease.RENEWED, lease.EXPIRES, lease.POLLED = (float(os.environ[name]) for name in ("RENEWED", "EXPIRES", "POLLED"))
    store = open_store(uri)

    def then(work: Work) -> None:
        if mode == "slow":
            time.sleep(0.5)
        elif mode == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)

    if mode == "killed-before-the-record":
        put = type(store).put

        def killed(self, *rest):
            put(self, *rest)
            os.kill(os.getpid(), signal.SIGKILL)

        type(store).put = killed
    made = get_or_make(store, folder, mode if mode == "stopped" else "made", then)
    say(f"{'cached' if made.cached else 'made'} {made.digest}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
