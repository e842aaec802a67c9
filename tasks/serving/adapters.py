"""Adapters of a running server: which ones it has, and the request to load and remove them.

    runs/serve/PORT/model.json     the server's file; it names the adapters, also for a start after a crash
    POST ADAPTERS                  the server reads the file again; it keeps its adapters if it refuses one

A name with a version stays with its adapter. A name without one moves if the adapter was loaded by that name.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from contract import ownership
from contract.faults import Fault
from contract.served_model import ADAPTERS, KEY, ServedAdapter, ServedModel
from tasks.serving import server

LOADS_WITHIN = 300.0  # seconds


def placed(adapters: list[ServedAdapter], new: ServedAdapter, moves: bool) -> list[ServedAdapter]:
    """Return the adapters with the new one. If it `moves` its name without a version, another adapter loses it."""
    version, *bare = new.names
    others = [one for one in adapters if one.names[0] != version]
    if moves:
        others = [replace(one, names=[name for name in one.names if name not in bare]) for one in others]
    taken = {name for one in others for name in one.names}
    return [*others, replace(new, names=[version, *(name for name in bare if name not in taken)])]


def without(served: ServedModel, name: str) -> ServedModel:
    """Return the server's description without the adapter of this name."""
    left = [one for one in served.adapters if name not in one.names]
    if len(left) == len(served.adapters):
        raise Fault(f"{name}: not loaded; the server has {_shown(served.adapters)}")
    return replace(served, adapters=left)


def running(folder: Path, port: int) -> ServedModel:
    """Return the description of the running server of a base that the folder belongs to, or raise a Fault."""
    if not (folder / server.FILE).is_file():
        raise Fault(f"--port {port}: no server was started at this port; python -m flows.serve NAME --adapters 4")
    served = ServedModel.read(folder / server.FILE)
    if not served.room:
        raise Fault(f"--port {port}: the server has a merged model; it takes adapters if started with --adapters")
    if not is_served(served):
        raise Fault(f"{server.url(served)} does not answer; python -m flows.serve starts the server")
    return served


def change(served: ServedModel, changed: ServedModel, folder: Path) -> None:
    """Make the running server load and remove adapters. After a Fault it has those that it had."""
    if len(changed.adapters) > served.room:
        raise Fault(
            f"the server has memory for {served.room} adapters, and {_shown(changed.adapters)} are "
            f"{len(changed.adapters)}; unload one, or start the server with --adapters {len(changed.adapters)}"
        )
    with ownership.locked(folder / "lock"):
        if ServedModel.read(folder / server.FILE) != served:
            raise Fault("another command has changed the server's adapters at the same moment; repeat this one")
        changed.write(folder / server.FILE)
        try:
            answer = _request("POST", f"{server.url(served)}{ADAPTERS}", LOADS_WITHIN)
            if answer is None or answer.is_error:
                raise Fault(f"{server.url(served)} has ended" if answer is None else _refusal(answer))
        except BaseException:
            served.write(folder / server.FILE)
            raise


def is_served(served: ServedModel) -> bool:
    """Return whether a server at the address has this model. Raise a Fault if it has another one."""
    address = f"{server.url(served)}/v1/models"
    answer = _request("GET", address, 10)
    if answer is None:
        return False
    try:
        cards = answer.json()["data"]
        roots = {card["id"]: card["root"] for card in cards}
        bases = {card["root"]: card["stamp"] for card in cards if "stamp" in card}
    except (ValueError, KeyError, TypeError):
        raise Fault(f"{address} is not a model server; --port names another") from None
    shown = ", ".join(f"{name} ({root})" for name, root in roots.items())
    wanted = {one.names[0]: one.folder for one in served.adapters} if served.room else {served.name: served.model}
    for name, root in wanted.items():
        if roots.get(name) != root:
            raise Fault(f"{address} serves {shown}, not {name} ({root}); --port names another")
    if served.model not in bases:
        raise Fault(f"{address} serves {shown}, not the base {served.model}; --port names another")
    if bases[served.model] != served.stamp:
        raise Fault(f"{address}: the files in {served.model} have changed since it loaded them; start it again")
    return True


def _request(method: str, address: str, within: float) -> httpx.Response | None:
    """Return the answer; None if nobody listens at the address."""
    key = os.environ.get(KEY, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, address, headers=headers, timeout=within)
    except httpx.ConnectError:
        return None
    except httpx.HTTPError as error:
        raise Fault(f"{address} does not answer ({type(error).__name__}); --port names another") from None
    if answer.status_code == 401:
        raise Fault(f"{address} requires a key: set {KEY} to the server's key")
    return answer


def _refusal(answer: httpx.Response) -> str:
    try:
        content: Any = answer.json()
        return str(content["refused"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} answers {answer.status_code}: {' '.join(answer.text.split())[:300]}"


def _shown(adapters: list[ServedAdapter]) -> str:
    return ", ".join(name for one in adapters for name in one.names[:1]) or "none"
