"""A process that has imported what many commands import, and runs each of them as a fork of itself.

    with preloaded.python("import flows.finetune", cwd, environment) as run:
        done = run("flows.finetune", "tiny", "--dry-run", cwd=folder, FINETUNE_STORE="store")
        flow = run.start("flows.finetune", "tiny", output=folder / "said.txt")

is python -m flows.finetune tiny --dry-run, without the seconds that the imports take, and another that runs on beside
the test. What is imported is what has no settings of its own, or none of those variables that differ from command to
command: some are read by an import.
"""

import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Started:
    """A command that runs on; its server answers for it, as its parent."""

    pid: int
    ask: Callable[[dict], int | None]

    def poll(self) -> int | None:
        return self.ask({"ended": self.pid})

    def wait(self, within: float) -> int:
        until = time.monotonic() + within
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} has not ended after {within:g} s")
            time.sleep(0.05)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class Preloaded:
    """Runs commands as forks of its server: run(module, *arguments, cwd=ROOT, **environment)."""

    ask: Callable[[dict], int | None]
    folder: Path

    def __call__(
        self, module: str, *arguments: object, cwd: Path = ROOT, merged: bool = False, **changed: str
    ) -> SimpleNamespace:
        """Code, output and errors of one command; with merged=True, its errors stand in its output, in their order."""
        files = [self.folder / name for name in ("output", "output" if merged else "errors")]
        for file in files:
            file.write_text("")
        code = self.ask(_request(module, arguments, cwd, files, changed))
        output, errors = [file.read_text() for file in files]
        return SimpleNamespace(code=code, output=output, errors=errors)

    def start(self, module: str, *arguments: object, output: Path, cwd: Path = ROOT, **changed: str) -> Started:
        """Start a command whose output and errors go to a file."""
        output.write_text("")
        pid = self.ask(_request(module, arguments, cwd, [output, output], changed) | {"runs_on": True})
        return Started(pid, self.ask)


def _request(module: str, arguments: Sequence[object], cwd: Path, files: list[Path], changed: dict[str, str]) -> dict:
    request = {"module": module, "arguments": [*map(str, arguments)], "cwd": str(cwd)}
    return request | {"environment": changed, "files": [*map(str, files)]}


@contextlib.contextmanager
def python(imports: str, environment: dict[str, str] | None = None) -> Iterator[Preloaded]:
    """Start a server that has these imports."""
    command = [sys.executable, "-m", "tests.support.preloaded", imports]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)

        def ask(request: dict) -> int | None:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        try:
            yield Preloaded(ask, Path(folder))
        finally:
            server.stdin.close()
            server.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5)  # longer, where a test was ended while a command ran
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, 9)
            server.wait()


def _next(replies: int) -> dict | None:
    """Fork for each command. Returns the request in the fork, and None in this process, once there are no more.

    It replies with the command's exit code or, where it runs on, with its process id.
    """
    ended: dict[int, int] = {}  # codes of commands that ran on
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            pid = request["ended"]
            if pid not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                ended[pid] = os.waitstatus_to_exitcode(found[1])
            answer = ended.get(pid)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # pyarrow's allocator has a thread, and sees to forks
                child = os.fork()
            if not child:
                os.close(replies)
                return request
            answer = child if request.get("runs_on") else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(replies, f"{json.dumps(answer)}\n".encode())
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
    gc.freeze()  # what was imported: each fork would look through it as it ends, for seconds where that is vLLM
    if asked := _next(replies):
        _become(asked)
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
