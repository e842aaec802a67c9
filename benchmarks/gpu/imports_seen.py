"""Which distributions commands import from, seen by running them.

The commands run in an environment of their own over this one. An audit hook there writes down each file that a process
executes as a module, or loads as an extension: of every process that they start, of those too that leave by os._exit,
and of nothing that is only looked for.
"""

import csv
import os
import subprocess
import sys
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOOK = """
import os, sys
sys.modules.update(dict.fromkeys({hidden}))
def note(event, arguments):
    if event == "exec":
        file = getattr(arguments[0], "co_filename", None)
    elif event == "import":
        file = arguments[1]
    else:
        return
    if isinstance(file, str) and file.endswith((".py", ".so")):
        to = os.open({files}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(to, (file + "\\n").encode())
        os.close(to)
sys.addaudithook(note)
"""


class Recorder:
    """An environment whose processes write down what they import; `hidden` are top-level modules that they miss."""

    def __init__(self, folder: Path, hidden: Collection[str] = ()):
        self.folder, self.files = folder, folder / "imported.txt"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
        self.python = folder / "env/bin/python"
        own = folder / f"env/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        (own / "imports_hook.py").write_text(HOOK.format(hidden=[*hidden], files=repr(str(self.files))))
        packages = [path for path in sys.path if any(Path(path).glob("*.dist-info"))]
        for libraries in (Path(path, "nvidia") for path in packages):
            if libraries.is_dir() and not (own / "nvidia").exists():
                (own / "nvidia").symlink_to(libraries)  # where Transformer Engine looks for them
        (own / "all.pth").write_text("\n".join([*packages, "import imports_hook"]) + "\n")

    def run(self, *command: str | Path, **changed: str) -> None:
        """Run a Python command from the root of the project; `changed` are variables of its environment."""
        log = self.folder / "command.log"
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | changed
        with log.open("w") as f:
            done = subprocess.run(
                [self.python, *command], cwd=ROOT, env=environment, stdout=f, stderr=subprocess.STDOUT
            )
        if done.returncode:
            said = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"python {' '.join(map(str, command))} failed here:\n{said}")

    def distributions(self) -> set[str]:
        """Names of the distributions that brought the files imported so far."""
        owners = {
            f"{folder}/{file}": name
            for found in metadata.distributions()
            for folder, name in [(Path(str(found.locate_file(""))).resolve(), found.metadata["Name"])]
            for file, *_ in csv.reader((found.read_text("RECORD") or "").splitlines())  # .files looks at each on disk
            if file.endswith((".py", ".so"))
        }
        files = {str(Path(file).resolve()) for file in self.files.read_text().splitlines()}
        return {owners[file] for file in files if file in owners}
