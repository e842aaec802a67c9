"""The guarded process itself: gives up its rights, then runs code of others (trainer/reinforcement/guarded/worker.py).

A function, or a rule, is loaded once, and asked many times. What a model has written runs in a process of its own for
each answer, so that no answer can change what another one is worth.
"""

import ast
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from conf import rewards
from trainer.reinforcement.guarded import rights

# What programs of models import most, and what sockets import on their own.
AT_HAND = "bisect collections copy datetime decimal encodings.idna fractions functools heapq itertools math operator"
AT_HAND += " random re statistics string typing"
ROOT = Path(__file__).resolve().parents[3]
LONGEST = 1 << 12  # bytes of an answer, letters of a reply

Answer = dict[str, Any]


def main(descriptor: int) -> None:
    connection, parent = Connection(descriptor), os.getppid()
    asked = json.loads(connection.recv_bytes())
    _import(AT_HAND.split())
    if asked["kind"] in ("function", "environment"):
        judge, first = _function(asked, parent)
    elif asked["kind"] in RULES:
        judge, first = _rule(asked, parent)
    else:

        def judge(**question: str) -> Answer:
            return _apart(question, asked["memory_gb"], connection)

        first = judge(prompt="", answer="", reference="")
    connection.send_bytes(json.dumps(first).encode())
    while "refused" not in first:
        question = json.loads(connection.recv_bytes())
        connection.send_bytes(json.dumps(judge(**question)).encode())


def _function(asked: dict[str, Any], parent: int) -> tuple[Callable[..., Answer], Answer]:
    """The function, asked safely, and whether it could be loaded. No line of its file runs with any right left."""
    try:
        source = asked["source"]
        rights.limit(asked["memory_gb"])
        rights.filter_calls()
        # By nobody they could not be found where Python lies among root's own files.
        _import(_imported(source, asked["file"]))
        rights.hide_files(ROOT)
        rights.become_nobody(parent)
        found: dict[str, Any] = {"__name__": "reward"}
        exec(compile(source, asked["file"], "exec"), found)
        function = found.get(asked["name"])
        if not callable(function):
            raise NameError(f"{asked['name']} is no function of the file")
    except BaseException as error:
        return _judged, {"refused": _told(error)}
    if asked["kind"] == "environment":
        return lambda **conversation: _replied(function, conversation), {"text": None}
    return lambda **question: _judged(function, question), {"reward": 0.0}


def _rule(asked: dict[str, Any], parent: int) -> tuple[Callable[..., Answer], Answer]:
    """A rule, asked as safely, and whether it could be."""
    rule, example = RULES[asked["kind"]]
    try:
        rule(prompt="", answer="{}", reference=example)  # has it import, and read, all that it needs
        rights.limit(asked["memory_gb"])
        rights.filter_calls()
        rights.hide_files(ROOT)
        rights.become_nobody(parent)
        rule(prompt="", answer="{}", reference=example)
    except BaseException as error:
        return _judged, {"refused": _told(error)}
    return lambda **question: _judged(rule, question), {"reward": 0.0}


def _apart(question: dict[str, str], memory_gb: float, connection: Connection) -> Answer:
    """What code says of an answer, in a process that ends with it."""
    me, (reading, writing) = os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            connection.close()
            os.close(reading)
            rights.limit(memory_gb)
            rights.filter_calls()
            rights.hide_files(ROOT)
            rights.become_nobody(me)
            os.write(writing, json.dumps(_judged(code, question)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        found = answer.read(LONGEST)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        return json.loads(found)
    except (ValueError, RecursionError):
        return {"refused": "it has ended its process"}


def _judged(judge: Callable[..., Any], question: dict[str, str]) -> Answer:
    try:
        value = judge(**question)
        if isinstance(value, str | bytes | bytearray) or not hasattr(value, "__float__"):
            return {"refused": f"it returned a {type(value).__name__}; a number is wanted"}
        return {"reward": float(value)}
    except BaseException as error:
        return {"refused": _told(error)}


def _replied(reply: Callable[..., Any], conversation: dict[str, Any]) -> Answer:
    try:
        text = reply(**conversation)
        if text is not None and not isinstance(text, str):
            return {"refused": f"it returned a {type(text).__name__}; text, or None, is wanted"}
        if text and len(text) > LONGEST:
            return {"refused": f"it returned {len(text)} letters; {LONGEST} are the most"}
        (text or "").encode()  # halves of letters have no tokens
        return {"text": text}
    except BaseException as error:
        return {"refused": _told(error)}


def _imported(source: str, file: str) -> Iterator[str]:
    """Names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(source, file)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


def _import(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # the file itself will say so
            importlib.import_module(name)


def code(prompt: str, answer: str, reference: str) -> float:
    """Share of the checks, a line of Python each, that hold after the program."""
    names: dict[str, Any] = {"__name__": "answer"}
    checks = [line for line in reference.splitlines() if line.strip()]
    exec(compile(_program(answer), "answer.py", "exec"), names)
    held = 0
    for check in checks:
        try:
            exec(compile(check, "check.py", "exec"), names)
            held += 1
        except Exception:  # an assertion, or whatever the program's own code raises
            continue
    return held / max(1, len(checks))


def regex(prompt: str, answer: str, reference: str) -> float:
    return float(rewards.regex(reference).search(answer) is not None)


def json_schema(prompt: str, answer: str, reference: str) -> float:
    import jsonschema

    try:
        rewards.schema(reference).validate(json.loads(answer))
    except (ValueError, RecursionError, jsonschema.ValidationError):
        return 0.0
    return 1.0


RULES = {"regex": (regex, "x"), "json_schema": (json_schema, '{"type": "object"}')}


def _program(answer: str) -> str:
    """The program of an answer, without the marks of Markdown around it."""
    if "```" not in answer:
        return answer
    inside = answer.split("```")[1]
    return inside.removeprefix("python").removeprefix("py")


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")[:300]
    except BaseException:  # its own code failed
        return type(error).__name__


if __name__ == "__main__":
    main(int(sys.argv[1]))
