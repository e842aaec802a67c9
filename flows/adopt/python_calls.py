"""Reader of Python scripts: keyword arguments of calls and assigned attributes, from the syntax tree. Nothing is run.

SFTConfig(learning_rate=2e-4) gives SFTConfig.learning_rate; cfg.train.train_iters = 100 gives cfg.train.train_iters.
Names that the script sets to constants are replaced by their values, and arguments of argparse by their defaults.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from typing import Any

from flows.adopt.stack import Source

IN_NAME = "GPUs in the function's name"


def sources(text: str) -> list[Source] | None:
    """Return one source per function that configures something, and one for the rest; None if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    imported = tuple(sorted(_imported(tree)))
    if not imported:
        return None
    options = _options(tree)
    constants = _constants(tree.body, options)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = [_source(tree.body, constants, "the script", imported, skip=functions)]
    for function in functions:
        known = _constants(function.body, constants | _parameters(function))
        part = _source(function.body, known, function.name, imported)
        if part.keys and (gpus := re.search(r"_(\d+)gpu_", function.name)):
            part.keys[IN_NAME] = int(gpus[1])
        found.append(part)
    found = [source for source in found if source.keys]
    if sum(len(source.keys) for source in found[1:]) and found[0].place == "the script":
        found.append(_joined(found, imported))
    for source in found if options else []:
        source.notes.append("arguments of the script have their default values here")
    return found


def calls(text: str) -> dict[str, Any]:
    """Return the keyword arguments of calls in a fragment without imports; none if it is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return _source(tree.body, {}, "", ()).keys


def usage(text: str) -> str:
    """Return the docstring of a script if it shows commands."""
    documented = ast.get_docstring(ast.parse(text)) or ""
    return documented if re.search(r" --\w", documented) else ""


def _joined(parts: list[Source], imported: tuple[str, ...]) -> Source:
    """Return all functions of a script together: a script often has its calls in main()."""
    keys: dict[str, Any] = {}
    for part in parts:
        keys = part.keys | keys
    keys.pop(IN_NAME, None)
    return Source("python", keys, "all functions", imported)


def _imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _parameters(function: ast.FunctionDef) -> dict[str, Any]:
    arguments = function.args.args[len(function.args.args) - len(function.args.defaults) :]
    named = [*zip(arguments, function.args.defaults, strict=True)]
    named += [
        (one, value) for one, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if value
    ]
    return {one.arg: _value(value, {}) for one, value in named if _value(value, {}) is not None}


def _options(tree: ast.Module) -> dict[str, Any]:
    """Return the defaults of argparse's arguments, such as args.lr."""
    named, defaults = {"args"}, dict[str, Any]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if _name(node.value.func).endswith(".parse_args") and isinstance(node.targets[0], ast.Name):
                named.add(node.targets[0].id)
        elif isinstance(node, ast.Call) and _name(node.func).endswith(".add_argument"):
            option = next((text for text in (_value(one, {}) for one in node.args) if str(text).startswith("--")), None)
            default = next((_value(one.value, {}) for one in node.keywords if one.arg == "default"), None)
            if option and default is not None:
                defaults[option.lstrip("-").replace("-", "_")] = default
    return {f"{name}.{option}": default for name in named for option, default in defaults.items()}


def _constants(body: list[ast.stmt], known: dict[str, Any]) -> dict[str, Any]:
    known = {**known}
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                known[target.id] = _value(node.value, known)
    return known


def _value(node: ast.AST | None, constants: dict[str, Any]) -> Any:
    """Return a constant, or the source of an expression as text."""
    if node is not None and (name := _name(node)) in constants:
        return constants[name]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, constants) for item in node.elts]
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return f"${{{ast.unparse(node)}}}"


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _source(
    body: list[ast.stmt],
    constants: dict[str, Any],
    place: str,
    imported: tuple[str, ...],
    skip: list[ast.FunctionDef] | None = None,
) -> Source:
    keys: dict[str, Any] = {}
    notes: list[str] = []

    def put(name: str, value: Any) -> None:
        if name in keys and keys[name] != value:
            notes.append(f"{name}: set to {keys[name]} and to {value}; the last one counts")
        keys[name] = value

    for statement in body:
        if skip and statement in skip:
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                for name, value in _call(node, constants):
                    if keys.setdefault(name, value) != value:
                        notes.append(f"{name}: {keys[name]} and {value} in two calls; the first one counts")
            elif (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Attribute)
                and not isinstance(node.value, ast.Call)
            ):
                put(_name(node.targets[0]), _value(node.value, constants))
    return Source("python", keys, place, imported, notes=notes)


def _call(node: ast.Call, constants: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    name = _name(node.func)
    last = name.rpartition(".")[2]
    if last == "add_argument":
        return
    short = ".".join(name.split(".")[-2:]) if last.startswith("from_") else last
    if name in ("run.Config", "run.Partial") and node.args:  # NeMo-Run
        short = _name(node.args[0]).rpartition(".")[2]
    elif short:
        for number, argument in enumerate(node.args):
            known = isinstance(constants.get(_name(argument)), str)
            if known or isinstance(argument, ast.Constant):
                yield f"{short}.{number}", _value(argument, constants)
    for keyword in node.keywords:
        if keyword.arg and not isinstance(keyword.value, ast.Call):
            yield f"{short}.{keyword.arg}", _value(keyword.value, constants)
