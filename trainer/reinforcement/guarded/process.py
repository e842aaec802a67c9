"""The guarded process: it gives up its rights, then runs untrusted code (trainer/reinforcement/guarded/worker.py).

A function or a rule is loaded once and called many times. A program written by a model runs in a new process for each
answer, so no answer can change the reward of another.
"""

import ast
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from conf import rewards
from trainer.reinforcement.guarded import rights

# Modules that models' programs import most, and that sockets import implicitly.
PRELOADED = "bisect collections copy datetime decimal encodings.idna fractions functools heapq itertools math operator"
PRELOADED += " random re statistics string typing"
ROOT = Path(__file__).resolve().parents[3]
LONGEST = 1 << 12  # bytes of a result, characters of a reply

Answer = dict[str, Any]


def main(descriptor: int) -> None:
    connection, parent = Connection(descriptor), os.getppid()
    settings = json.loads(connection.recv_bytes())
    _import(PRELOADED.split())
    answer: Callable[..., Answer] = _called
    try:
        answer, first = _load(settings, parent, connection)
    except BaseException as error:
        first = {"refused": _line(error)}
    connection.send_bytes(json.dumps(first).encode())
    while "refused" not in first:
        question = json.loads(connection.recv_bytes())
        connection.send_bytes(json.dumps(answer(question)).encode())


def _load(settings: dict[str, Any], parent: int, connection: Connection) -> tuple[Callable[..., Answer], Answer]:
    """Return the function that answers questions, and a first answer, which reports whether the code was loaded."""
    kind, memory_gb, loaded = settings["kind"], settings["memory_gb"], {"reward": 0.0, "text": None}
    if kind == "code":
        in_fork = partial(_in_fork, memory_gb, connection)
        return in_fork, in_fork({"prompt": "", "answer": "", "reference": ""})
    if kind in RULES:
        rule, example = RULES[kind]
        rule(prompt="", answer="{}", reference=example)  # imports and reads all that the rule needs
        _give_up_rights(memory_gb, parent)
        rule(prompt="", answer="{}", reference=example)
        return partial(_called, rule, _reward), loaded
    source, file, name = settings["source"], settings["file"], settings["name"]
    _give_up_rights(memory_gb, parent, _imported(source, file))
    namespace: dict[str, Any] = {"__name__": "reward"}
    exec(compile(source, file, "exec"), namespace)
    function = namespace.get(name)
    if not callable(function):
        raise NameError(f"the file has no function {name}")
    return partial(_called, function, _reply if kind == "environment" else _reward), loaded


def _give_up_rights(memory_gb: float, parent: int, modules: Iterable[str] = ()) -> None:
    """Give up all rights. `modules` are imported when the network is off, but before files become unreadable.

    The user nobody could not import them if Python is in root's home.
    """
    rights.limit(memory_gb)
    rights.filter_calls()
    _import(modules)
    rights.hide_files(ROOT)
    rights.become_nobody(parent)


def _in_fork(memory_gb: float, connection: Connection, question: dict[str, str]) -> Answer:
    """Run code() for an answer in a fork that ends with it."""
    me, (reading, writing) = os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            connection.close()
            os.close(reading)
            _give_up_rights(memory_gb, me)
            os.write(writing, json.dumps(_called(code, _reward, question)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        result = answer.read(LONGEST)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        return json.loads(result)
    except (ValueError, RecursionError):
        return {"refused": "it has ended its process"}


def _called(function: Callable[..., Any], check: Callable[[Any], Answer], question: dict[str, Any]) -> Answer:
    """The checked result of a function that was called with a question, or the error."""
    try:
        return check(function(**question))
    except BaseException as error:
        return {"refused": _line(error)}


def _reward(value: Any) -> Answer:
    if isinstance(value, str | bytes | bytearray) or not hasattr(value, "__float__"):
        return {"refused": f"it returned a {type(value).__name__}; it must return a number"}
    return {"reward": float(value)}


def _reply(text: Any) -> Answer:
    if text is not None and not isinstance(text, str):
        return {"refused": f"it returned a {type(text).__name__}; it must return text or None"}
    if text and len(text) > LONGEST:
        return {"refused": f"it returned {len(text)} characters; {LONGEST} at most"}
    (text or "").encode()  # raises for lone surrogates, which have no tokens
    return {"text": text}


def _imported(source: str, file: str) -> Iterator[str]:
    """Names of all modules that a file imports, at any depth."""
    for node in ast.walk(ast.parse(source, file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _import(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # running the file will report it
            importlib.import_module(name)


def code(prompt: str, answer: str, reference: str) -> float:
    """Share of the checks (one line of Python each) that pass after the program."""
    names: dict[str, Any] = {"__name__": "answer"}
    checks = [line for line in reference.splitlines() if line.strip()]
    exec(compile(_program(answer), "answer.py", "exec"), names)
    passed = 0
    for check in checks:
        try:
            exec(compile(check, "check.py", "exec"), names)
            passed += 1
        except Exception:  # an assertion, or any error of the program's code
            continue
    return passed / max(1, len(checks))


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


def _line(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")[:300]
    except BaseException:  # the error's own __str__ failed
        return type(error).__name__


if __name__ == "__main__":
    main(int(sys.argv[1]))
