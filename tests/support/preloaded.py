"""A process that has imported what many commands import, and runs each of them as a fork of itself.

    with preloaded.python("import flows.finetune", cwd, environment) as run:
        done = run("flows.finetune", "tiny", "--dry-run", cwd=folder, FINETUNE_STORE="store")

is python -m flows.finetune tiny --dry-run, without the seconds that the imports take. What is imported is what has no
settings of its own, or none of those variables that differ from command to command: some are read by an import.
"""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def python(imports: str, environment: dict[str, str] | None = None) -> Iterator[Callable[..., SimpleNamespace]]:
    """run(module, *arguments, cwd=ROOT, **environment) -> code, output and errors of one command at a time.

    With merged=True, its errors stand in its output, in their order.
    """
    command = [sys.executable, "-m", "tests.support.preloaded", imports]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)

        def run(module: str, *arguments: object, cwd: Path = ROOT, merged: bool = False, **changed: str):
            files = [Path(folder) / name for name in ("output", "output" if merged else "errors")]
            for file in files:
                file.write_text("")
            request = {"module": module, "arguments": [*map(str, arguments)], "cwd": str(cwd)}
            request |= {"environment": changed, "files": [*map(str, files)]}
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            code = json.loads(server.stdout.readline())
            output, errors = [file.read_text() for file in files]
            return SimpleNamespace(code=code, output=output, errors=errors)

        try:
            yield run
        finally:
            server.stdin.close()
            server.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5)  # longer, where a test was ended while a command ran
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, 9)
            server.wait()


def _next(replies: int) -> dict | None:
    """Fork for each request. Returns the request in the fork, and None in this process, once there are no more."""
    for line in sys.stdin:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pyarrow's allocator has a thread, and sees to forks
            child = os.fork()
        if not child:
            os.close(replies)
            return json.loads(line)
        os.write(replies, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return None


def _become(request: dict) -> None:
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    for file, descriptor in zip(["/dev/null", *request["files"]], range(3), strict=True):
        opened = os.open(file, os.O_RDWR | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(0, closefd=False)  # the server's has read ahead
    sys.argv = ["", *request["arguments"]]


if __name__ == "__main__":
    replies = os.dup(1)
    os.dup2(2, 1)  # what is imported may print
    exec(sys.argv[1])
    if asked := _next(replies):
        _become(asked)
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
