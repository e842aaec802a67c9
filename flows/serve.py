"""Serve a tuned model on this host with vLLM, through OpenAI's API.

    python -m flows.serve tiny-tickets                 the champion of the registered model, at http://127.0.0.1:8000/v1
    python -m flows.serve tiny-tickets@7               version 7; also @challenger and other aliases
    python -m flows.serve export/720f27b0              an export in the store; also the name of a flow run
    python -m flows.serve tiny-tickets --check         repeat the evaluation's questions, compare, and end

Adapters of one base, not merged, requested by NAME@VERSION, or by NAME for the champion at the time of loading:

    python -m flows.serve tiny-tickets --adapter       the released model, or the packed one, with the adapter
    python -m flows.serve a@3 b@1 --adapters 4         two adapters, and memory for two more
    python -m flows.serve load a                       add the champion of a to the running server
    python -m flows.serve unload a@3                   remove version 3 of a

The server runs until Ctrl-C or SIGTERM. --check asks the server at the address if one runs there, otherwise it starts
one. If VLLM_API_KEY is set, clients must send that key; with --host beyond this host it is required.
Exit codes: 0, 1 if the server crashed or answers differ, 2 for an error that you can fix.
"""

# pyright: reportFunctionMemberAccess=false

import ipaddress
import json
import os
import shlex
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Template
from prefect import State, flow, get_run_logger
from prefect.states import Completed, Failed

from conf.host import gpu_locks
from contract import closed_pipe, json_object
from contract.faults import Broken, Fault, line_of
from contract.served_model import DEFAULTS, KEY, ServedModel
from flows import arguments, secret_blocks
from flows.arguments import HOST, PORT
from tasks.run import artifact
from tasks.run.launch import Turn
from tasks.run.places import kernels_folder, open_run_store, runs_folder
from tasks.servers.waiting import say
from tasks.serving import adapters, artifacts, questions, server
from tasks.serving.artifacts import Sources
from tasks.tracking.address import resolve

SAMPLING = {**DEFAULTS, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # vLLM would otherwise take these from a release
HOW_TO_ASK = Path(__file__).with_name("how_to_ask.txt.j2")
Say = Callable[[str], None]


@arguments.reports_faults
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments.serve().parse_args(argv)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    word, *names = options.names
    if word in CHANGES and names:
        CHANGES[word](names, options.port)
        return 0
    room = max(options.adapters, options.adapter)
    sources, served = prepare(options.names, options.host, options.port, room, options.length)
    if options.check:
        return check(sources, served, say, ended)
    run(sources, served, say, ended.is_set)
    say("stopped")
    return 0


@flow(name="serve", flow_run_name="serve-{model}", persist_result=False)
def serve(
    model: str,
    host: str = HOST,
    port: int = PORT,
    adapter: bool = False,
    length: int | None = None,
    adapters: int = 0,
) -> State:
    """Serve a model until this run is cancelled.

    Args:
        model: A registered model (its champion), NAME@VERSION, export/FINGERPRINT or a run of the flow; several with
            spaces between them.
        host: Address to listen at. Beyond this host, the worker's environment has to hold VLLM_API_KEY.
        port: Port to listen at.
        adapter: Serve the released model with the adapter, not merged.
        length: Tokens of a question and its answer; by default as many as memory holds.
        adapters: Adapters of one base for which the server has memory.
    """
    secret_blocks.use()
    try:
        sources, served = prepare(model.split(), host, port, max(adapters, adapter), length)
        run(sources, served, get_run_logger().info, lambda: False)
    except (Fault, Broken, OSError) as error:
        line = str(error) if isinstance(error, Broken) else line_of(error)
        if line is None:
            raise
        return Failed(message=line)
    return Completed(message="stopped")


def prepare(
    names: Sequence[str], host: str, port: int, room: int, length: int | None
) -> tuple[list[Sources], ServedModel]:
    """Find the models to serve, and copy them to this host. With `room` or several names, they are adapters."""
    _require_key(host)
    if not 1 <= port < 2**16:  # for 0 the system would choose a port, which could not be printed beforehand
        raise Fault(f"--port: {port} is not a port, from 1 to {2**16 - 1}")
    if length is not None and length < 2:
        raise Fault(f"--length: {length} is too small for a question and an answer; it must be at least 2")
    sources = _collect(names, adapter=room > 0 or len(names) > 1)
    where = {"host": host, "port": port, "kernels": str(kernels_folder())}
    return sources, artifacts.served_model(sources, open_run_store(), _cache(), room, length=length, **where)


def load(names: Sequence[str], port: int) -> None:
    """Load adapters into the running server. A name without a version then stands for the champion."""
    folder = _folder(port)
    served, store = adapters.running(folder, port), open_run_store()
    changed = served
    for name, sources in zip(names, _collect(names, adapter=True), strict=True):
        artifacts.require_base(sources, vars(served), store, _cache())
        new = artifacts.adapter(sources, store, _cache())
        changed = replace(changed, adapters=adapters.placed(changed.adapters, new, moves="@" not in name))
    adapters.change(served, changed, folder)
    say("\n".join(_loaded(changed)))


def unload(names: Sequence[str], port: int) -> None:
    """Remove adapters from the running server."""
    folder = _folder(port)
    served = changed = adapters.running(folder, port)
    for name in names:
        changed = adapters.without(changed, name.replace("/", "-"))  # as artifacts.find names an export
    adapters.change(served, changed, folder)
    say("\n".join(_loaded(changed)))


CHANGES = {"load": load, "unload": unload}


def run(sources: list[Sources], served: ServedModel, say: Say, stop: Callable[[], bool]) -> None:
    """Serve until stop()."""
    server.require_free(served.host, served.port)
    title, address = f"{_titles(sources)} ({sources[0].form}, {served.precision})", server.url(served)

    def answered(seconds: float) -> None:
        commands = how_to_ask(served, sources[0].settings.get("max_tokens"))
        say(f"serving {title} at {address}/v1, after {seconds:.0f} s; ask:\n\n{commands}")

    say(f"{title}: {', '.join(one.named.export.key for one in sources)}, soon at {address}")
    say(settings(Path(served.model)))
    _keep(title, served, say, stop, answered)


def check(sources: list[Sources], served: ServedModel, say: Say, ended: threading.Event) -> int:
    """Ask the evaluations' questions and return the exit code. If no server runs, start one and stop it afterwards."""
    asked = [_questions(one) for one in sources]
    told: list[questions.Compared] = []

    def compare(_: float = 0.0) -> None:
        required = 1.0 if served.precision == "fp32" else questions.NEARLY_ALL
        address, key = f"{server.url(served)}/v1", os.environ.get(KEY, "")
        for one, rows in zip(sources, asked, strict=True):
            limit, stop = one.settings["max_tokens"], questions.stops(_data(one))
            name = one.named.names[0] if one.unmerged else served.name
            told.append(questions.ask(address, key, name, rows, limit, stop, required))
        ended.set()

    if adapters.is_served(served):
        compare()
    else:
        server.require_free(served.host, served.port)
        _keep(f"{_titles(sources)}, to be checked", served, say, ended.is_set, compare)
    if not told:  # the server ended before it answered
        return 1
    for one, rows, compared in zip(sources, asked, told, strict=True):
        assert one.evaluation
        what = f"{len(rows)} questions of {one.evaluation.key}, greedy, {one.settings['max_tokens']} tokens at most"
        say(f"check of {one.named.title} ({one.form}, {served.precision}): {what}")
        say("\n".join(compared.lines()))
    return 0 if all(compared.ok for compared in told) else 1


def _collect(names: Sequence[str], adapter: bool) -> list[Sources]:
    store = open_run_store()
    found = [artifacts.find(name, store, resolve(None, runs_folder())) for name in names]
    return [artifacts.collect(one, store, adapter, gpus=bool(gpu_locks.visible())) for one in found]


def _questions(sources: Sources) -> list[questions.Question]:
    if sources.evaluation is None:
        title, export = sources.named.title, sources.named.export.key
        raise Fault(f"{title}: the store has no evaluation of {export} to compare with")
    asked = questions.of(artifact.local(sources.evaluation, open_run_store(), _cache()), _data(sources))
    if not asked:
        raise Fault(f"{sources.evaluation.key}: it kept no answers of held_out (evaluate.tasks, evaluate.samples)")
    return asked


def _data(sources: Sources) -> Path:
    return artifact.local(sources.data, open_run_store(), _cache())


def _titles(sources: list[Sources]) -> str:
    return ", ".join(one.named.title for one in sources)


def _loaded(served: ServedModel) -> list[str]:
    """Return a line for each adapter, and for the base."""
    rows = [f"{' and '.join(one.names)}: {one.folder}" for one in served.adapters]
    return [f"{server.url(served)}/v1 serves", *rows, f"{served.name}: {served.model}"]


def _folder(port: int) -> Path:
    return runs_folder() / "serve" / str(port)


def _cache() -> Path:
    return runs_folder() / "cache"


def settings(model: Path) -> str:
    """Return a line with the default settings of requests, and the release's settings that do not apply."""
    file = model / "generation_config.json"
    released = json_object.read(file) if file.is_file() else {}
    unlike = [f"{name} {released[name]}" for name, ours in SAMPLING.items() if released.get(name) not in (None, ours)]
    ours = ", ".join(f"{name} {value:g}" for name, value in DEFAULTS.items())
    left = f"; {file.name} of the release has {', '.join(unlike)}, which a request can name" if unlike else ""
    return f"requests that name no settings are answered as in the evaluation: {ours}{left}"


def how_to_ask(served: ServedModel, max_tokens: int | None) -> str:
    """Return commands (curl, OpenAI's client) that query the server with the evaluation's settings."""
    name = served.adapters[0].names[-1] if served.adapters else served.name
    asked = questions.request(name, max_tokens, questions.stops(Path(served.data)))
    asked["messages"] = [{"role": "user", "content": questions.example(Path(served.data))}]
    return Template(HOW_TO_ASK.read_text("utf-8"), trim_blocks=True, keep_trailing_newline=True).render(
        address=f"{server.url(served)}/v1",
        key=KEY if os.environ.get(KEY) else "",
        content=shlex.quote(json.dumps(asked, ensure_ascii=False)),
        arguments=", ".join(f"{name}={value!r}" for name, value in asked.items()),
    )


def _keep(
    title: str, served: ServedModel, say: Say, stop: Callable[[], bool], answered: Callable[[float], None]
) -> None:
    turn = Turn(f"serving {title}", say, gpus=served.gpus)
    server.keep(served, _folder(served.port), say, stop, answered, turn)


def _require_key(host: str) -> None:
    try:
        alone = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        alone = False
    if not alone and not os.environ.get(KEY):
        raise Fault(
            f"--host {host}: other hosts can connect without a key; set {KEY} in the environment, or use "
            f"--host {HOST} for this host alone"
        )


if __name__ == "__main__":
    closed_pipe.run(main)
