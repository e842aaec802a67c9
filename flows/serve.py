"""Serve a tuned model on this host with vLLM, through OpenAI's API.

    python -m flows.serve tiny-tickets                 the champion of the registered model, at http://127.0.0.1:8000/v1
    python -m flows.serve tiny-tickets@7               version 7; also @challenger and other aliases
    python -m flows.serve export/720f27b0              an export in the store; also the name of a flow run
    python -m flows.serve tiny-tickets --adapter       the released model with the adapter, not merged
    python -m flows.serve tiny-tickets --check         repeat the evaluation's questions, compare, and end

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
from pathlib import Path

import httpx
from jinja2 import Template
from prefect import State, flow, get_run_logger
from prefect.states import Completed, Failed

from conf.host import gpu_locks
from contract import closed_pipe, json_object
from contract.faults import Broken, Fault, line_of
from contract.served_model import DEFAULTS, KEY, ServedModel
from flows import arguments
from flows.arguments import HOST, PORT
from tasks.run import artifact
from tasks.run.launch import Turn
from tasks.run.places import kernels_folder, open_run_store, runs_folder
from tasks.servers.waiting import say
from tasks.serving import artifacts, questions, server
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
    sources, served = prepare(options.name, options.host, options.port, options.adapter, options.length)
    if options.check:
        return check(sources, served, say, ended)
    run(sources, served, say, ended.is_set)
    say("stopped")
    return 0


@flow(name="serve", flow_run_name="serve-{model}", persist_result=False)
def serve(model: str, host: str = HOST, port: int = PORT, adapter: bool = False, length: int | None = None) -> State:
    """Serve a model until this run is cancelled.

    Args:
        model: A registered model (its champion), NAME@VERSION, export/FINGERPRINT or a run of the flow.
        host: Address to listen at. Beyond this host, the worker's environment has to hold VLLM_API_KEY.
        port: Port to listen at.
        adapter: Serve the released model with the adapter, not merged.
        length: Tokens of a question and its answer; by default as many as memory holds.
    """
    try:
        sources, served = prepare(model, host, port, adapter, length)
        run(sources, served, get_run_logger().info, lambda: False)
    except (Fault, Broken, OSError) as error:
        line = str(error) if isinstance(error, Broken) else line_of(error)
        if line is None:
            raise
        return Failed(message=line)
    return Completed(message="stopped")


def prepare(name: str, host: str, port: int, adapter: bool, length: int | None) -> tuple[Sources, ServedModel]:
    """Find the model to serve, and copy it to this host."""
    _require_key(host)
    if not 1 <= port < 2**16:  # for 0 the system would choose a port, which could not be printed beforehand
        raise Fault(f"--port: {port} is not a port, from 1 to {2**16 - 1}")
    if length is not None and length < 2:
        raise Fault(f"--length: {length} is too small for a question and an answer; it must be at least 2")
    store, folder = open_run_store(), runs_folder()
    found = artifacts.find(name, store, resolve(None, folder))
    sources = artifacts.collect(found, store, adapter, gpus=bool(gpu_locks.visible()))
    where = {"host": host, "port": port, "kernels": str(kernels_folder())}
    return sources, artifacts.served_model(sources, store, folder / "cache", length=length, **where)


def run(sources: Sources, served: ServedModel, say: Say, stop: Callable[[], bool]) -> None:
    """Serve until stop()."""
    server.require_free(served.host, served.port)
    title, address = f"{sources.named.title} ({sources.form}, {served.precision})", server.url(served)

    def answered(seconds: float) -> None:
        commands = how_to_ask(served, sources.settings.get("max_tokens"))
        say(f"serving {title} at {address}/v1, after {seconds:.0f} s; ask:\n\n{commands}")

    say(f"{title}: {sources.named.export.key}, soon at {address}")
    say(settings(Path(served.model)))
    _keep(title, served, say, stop, answered)


def check(sources: Sources, served: ServedModel, say: Say, ended: threading.Event) -> int:
    """Ask the evaluation's questions and return the exit code. If no server runs, start one and stop it afterwards."""
    if sources.evaluation is None:
        raise Fault(f"{sources.named.title}: the store has no evaluation of {sources.named.export.key} to compare with")
    store, cache = open_run_store(), runs_folder() / "cache"
    asked = questions.of(artifact.local(sources.evaluation, store, cache), Path(served.data))
    if not asked:
        raise Fault(f"{sources.evaluation.key}: it kept no answers of held_out (evaluate.tasks, evaluate.samples)")
    told: list[questions.Compared] = []

    def compare(_: float = 0.0) -> None:
        required = 1.0 if served.precision == "fp32" else questions.NEARLY_ALL
        limit, stop = sources.settings["max_tokens"], questions.stops(Path(served.data))
        address, key = f"{server.url(served)}/v1", os.environ.get(KEY, "")
        told.append(questions.ask(address, key, served.name, asked, limit, stop, required))
        ended.set()

    if _is_served(served):
        compare()
    else:
        server.require_free(served.host, served.port)
        _keep(f"{sources.named.title}, to be checked", served, say, ended.is_set, compare)
    if not told:  # the server ended before it answered
        return 1
    what = (
        f"{len(asked)} questions of {sources.evaluation.key}, greedy, {sources.settings['max_tokens']} tokens at most"
    )
    say(f"check of {sources.named.title} ({sources.form}, {served.precision}): {what}")
    say("\n".join(told[0].lines()))
    return 0 if told[0].ok else 1


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
    asked = questions.request(served.name, max_tokens, questions.stops(Path(served.data)))
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
    server.keep(served, runs_folder() / "serve" / str(served.port), say, stop, answered, turn)


def _is_served(served: ServedModel) -> bool:
    """Return whether a server at the address serves this model. Raise a Fault if it serves another model."""
    key = os.environ.get(KEY, "")
    address = f"{server.url(served)}/v1/models"
    try:
        answer = httpx.get(address, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=10)
    except httpx.ConnectError:
        return False
    except httpx.HTTPError as error:
        raise Fault(f"{address} does not answer ({type(error).__name__}); --port names another") from None
    if answer.status_code == 401:
        raise Fault(f"{address} requires a key: set {KEY} to the server's key")
    try:
        there = {one["id"]: one["root"] for one in answer.json()["data"]}
    except (ValueError, KeyError, TypeError):
        raise Fault(f"{address} is not a model server; --port names another") from None
    wanted = served.adapter or served.model
    if there.get(served.name) != wanted:
        shown = ", ".join(f"{name} ({root})" for name, root in there.items())
        raise Fault(f"{address} serves {shown}, not {served.name} ({wanted}); --port names another")
    return True


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
