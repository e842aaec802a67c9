"""Start of every trainer command: read and check the configuration, start the ranks, report faults in one line.

    python -m trainer.train CONF [key=value ...]        checks, then runs layout.gpus_per_node processes on this host
    python -m trainer.startup.torchrun ... -m trainer.train RESOLVED.yaml       ranks of a run over several hosts

Exit code 0 is success, 2 a fault that the user can correct (one line on stderr names it), 1 anything else. Without
torchrun, a run of one process runs in this process. Several processes are started by torchrun, or, if the command uses
no GPU, by forking this process (forks.py). torchrun's report of a failed child would hide the line that matters:
therefore ranks write their fault to a file, and later output on stderr is dropped.
"""

# pyright: reportOptionalMemberAccess=false

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil

from conf import network
from conf.host import gpu_locks, nvidia_smi
from conf.load import dump, load
from conf.rules.gpus import takes
from conf.schema.run import Run
from contract import closed_pipe, ownership
from contract.faults import Fault, line_of
from contract.files import write_atomically
from contract.processes import end_with_parent
from trainer.startup import device, forks, heartbeat
from trainer.startup.console import say

FAULT_FILE = "TRAINER_FAULT_FILE"
OWNED = "TRAINER_OWNED"  # set for ranks if the process that starts them owns the folder
GUARDED = "GUARD_PID"  # set for processes that a flow has started (tasks/run/guard.py)
LEAVES = 5.0  # seconds after gang.grace until a guard has killed the remaining processes
# Environment of a single process. With port 0 the system chooses a free port. One that was tested before could be in
# use by then.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
REPLACED = ("base", "data", "export")  # folders that are replaced as a whole

Work = Callable[[Run], None]
Check = Callable[[Run], Run | None]
Owned = Callable[[Run], AbstractContextManager[None]]


@closed_pipe.quiet()
def start(
    main: Work,
    check: Check,
    alone: bool = False,
    writes: str | None = None,
    may_write: Work | None = None,
    gpus: str | None = None,
    imports: Work | None = None,
) -> None:
    """Run a command's main(run) on every rank after check(run) has passed. Does not return on failure.

    A check that completes the run, for example from its data, returns the new run.

    With `alone`, the command ignores the layout: it has one process, or one on each host of a gang. `writes` is the key
    in paths of the folder that it writes: may_write(run) raises a Fault before anything is written there, and
    contract/ownership.py prevents other processes from writing it. `gpus` names the stage; the command waits for
    that stage's number of free GPUs on this host and takes them, except in ranks that torchrun or a gang has started.

    A command with `imports` uses no GPU; that function imports the modules that all its ranks need.
    """
    owned = partial(own, key=writes) if writes else contextlib.nullcontext
    module = sys.modules["__main__"]
    name = module.__spec__.name
    options = parser_of_run(name, module.__doc__, "layout.tp=2 or train.steps=10").parse_args()
    _die_with_agent()
    with faults_in_one_line():
        run = load(options.conf, options.overrides)
        if run.layout.auto:
            advice = "python -m flows.plan shows the layout that flows.finetune would choose"
            raise Fault(f"layout.auto: true, but a trainer command needs an explicit layout; {advice}")
        if may_write and "RANK" not in os.environ:
            may_write(run)
        if alone and "GANG_ATTEMPT" in os.environ:
            _be_rank(main, check, run, owned, may_write, trains=False)
        elif "RANK" in os.environ and not alone:
            _check_world(run)
            _be_rank(main, check, run, owned, may_write, trains=True)
        elif alone or run.world == 1:
            with owned(run):
                run = check(run) or run
                _take_gpus(run, gpus)
                if not alone:
                    os.environ.update(_environment(run) | ALONE)
                main(run)
        else:
            if run.layout.nodes > 1:
                raise Fault(
                    f"layout.nodes: {run.layout.nodes} hosts; start one torchrun per host, or override layout.nodes=1"
                )
            with owned(run):
                run = check(run) or run
                if not imports:
                    _take_gpus(run, gpus)
                    sys.exit(_torchrun(run, name))
                code = _forks(main, run, imports)
            _leave(code)


def own(run: Run, key: str) -> AbstractContextManager[None]:
    """Own the folder paths.<key>. The process that starts the ranks owns it, or rank 0 in a gang and under torchrun.

    A command of a flow waits for the process of a killed flow. A second start by hand is refused at once.
    """
    if OWNED in os.environ or os.environ.get("RANK", "0") != "0":
        return contextlib.nullcontext()
    folder, attempt = Path(getattr(run.paths, key)), os.environ.get("GANG_ATTEMPT", "")
    patience = run.gang.grace + LEAVES if GUARDED in os.environ else 0.0
    return ownership.hold(folder, f"paths.{key}", key in REPLACED, attempt, patience, say)


def _leave(code: int) -> NoReturn:
    """End this process at once, after its forks: Python's normal shutdown takes a fifth of a second."""
    closed_pipe.drop_unread()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _take_gpus(run: Run, stage: str | None) -> None:
    """Take the command's share of this host's GPUs until this process ends.

    If a flow has started the command, the flow has already taken them.
    """
    if stage:
        command = sys.modules["__main__"].__spec__.name.removesuffix(".__main__").rpartition(".")[2]
        hold = gpu_locks.take(f"{command} of {run.name}, started by hand", say, count=takes(run, stage).gpus)
        os.environ.update(hold.environment if hold else {})


def _be_rank(main: Work, check: Check, run: Run, owned: Owned, may_write: Work | None, trains: bool) -> None:
    heartbeat.begin()
    try:
        if may_write:
            may_write(run)
        run = check(run) or run
        if "GANG_ATTEMPT" in os.environ:
            if trains:
                device.start()  # before torch is loaded
            heartbeat.meet()
        with owned(run):  # only rank 0 takes the folder; the others wait for it before they write
            main(run)
        heartbeat.over()
    except Exception as error:
        heartbeat.failed(error)
        raise


@contextlib.contextmanager
def faults_in_one_line():
    """Report an error that is not a defect of this program in one line on stderr, and exit with code 2."""
    try:
        yield
    except BaseException as error:  # torch's CheckpointException does not inherit from Exception
        line = line_of(error)
        if line is None:
            raise
        _report(line)
        sys.exit(2)


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a command, with the docstring of its module as the description."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parser_of_run(module: str, description: str | None, example: str) -> argparse.ArgumentParser:
    """The parser of a command that takes a configuration and changes of its keys."""
    of_run = parser(module, description)
    of_run.add_argument("conf", help="a name (tiny), or the path of a YAML file")
    of_run.add_argument("overrides", nargs="*", metavar="key=value", help=f"such as {example}")
    return of_run


def _die_with_agent() -> None:
    """Make a rank end when torchrun ends, also if torchrun is killed and cannot send a signal."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end_with_parent()
    if os.getppid() in (1, int(os.environ.get(GUARDED, "1"))) and not _is_torchrun(os.getppid()):
        os._exit(1)  # torchrun died before end_with_parent(): this process already has the parent of orphans


def _is_torchrun(pid: int) -> bool:
    """Whether this process is torchrun, which may be the first process in a container."""
    try:
        return b"torch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _check_world(run: Run) -> None:
    world = int(os.environ["WORLD_SIZE"])
    if world != run.world:
        raise Fault(
            f"torchrun started {world} processes, but layout.nodes {run.layout.nodes} x "
            f"layout.gpus_per_node {run.layout.gpus_per_node} is {run.world}"
        )


def _environment(run: Run) -> dict[str, str]:
    """Variables for ranks on this host's GPUs, except those that are already set, as by a gang (tasks/gang)."""
    variables = network.sockets() | network.environment(run, nvidia_smi.kind())
    return {name: value for name, value in variables.items() if name not in os.environ}


def _have_ranks_save(torchrun: subprocess.Popen) -> None:
    """Send SIGTERM directly to the ranks, which then save a checkpoint and end.

    If torchrun gets the signal, it kills the ranks after 30 seconds and ends with a stack trace.
    """
    ranks = []
    with contextlib.suppress(psutil.Error):
        ranks = psutil.Process(torchrun.pid).children()
    for process in ranks or [torchrun]:
        with contextlib.suppress(psutil.Error):
            process.terminate()


def _forks(main: Work, run: Run, imports: Work) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process that has used a GPU cannot be forked
    forks.share(run.world)
    device.start()
    imports(run)

    def work() -> None:
        with faults_in_one_line():
            _be_rank(main, lambda _: None, run, lambda _: contextlib.nullcontext(), None, trains=False)

    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        fault = Path(folder) / "fault"
        os.environ |= {FAULT_FILE: str(fault), OWNED: "1"}
        return _code(forks.run(work, run.world, lambda lines: _forward(lines, fault)), fault)


def _code(code: int, fault: Path) -> int:
    """Exit code of the command for this exit code of its ranks. Prints the fault that a rank has written."""
    if fault.exists():
        print(fault.read_text(), end="", file=sys.stderr)
        return 2
    return min(code, 1) if code >= 0 else 128 - code


def _torchrun(run: Run, module: str) -> int:
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        resolved, fault = Path(folder) / "resolved.yaml", Path(folder) / "fault"
        dump(run, resolved)
        command = [sys.executable, "-m", "trainer.startup.torchrun", *network.meeting(1, 0, "127.0.0.1", 0)]
        command += ["--nproc-per-node", str(run.layout.gpus_per_node), "-m", module, str(resolved)]
        environment = os.environ | _environment(run) | {FAULT_FILE: str(fault), OWNED: "1"}
        environment |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        ranks = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent
        )
        signal.signal(signal.SIGTERM, lambda *_: _have_ranks_save(ranks))
        forward = threading.Thread(target=_forward, args=(ranks.stderr, fault))
        forward.start()
        try:
            code = ranks.wait()
        except KeyboardInterrupt:
            ranks.terminate()
            code = ranks.wait()
        forward.join()
        return _code(code, fault)


def _forward(lines, fault: Path) -> None:
    for line in lines:
        if not fault.exists():
            sys.stderr.write(line)


def _report(lines: str) -> None:
    text = "".join(f"error: {line}\n" for line in lines.splitlines())
    if FAULT_FILE in os.environ:
        if not os.path.exists(os.environ[FAULT_FILE]):  # only the first rank that fails writes it
            write_atomically(os.environ[FAULT_FILE], text, durable=False)
    elif os.environ.get("RANK", "0") == "0":
        sys.stderr.write(text)
