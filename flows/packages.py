"""Installed packages and the packages in uv.lock. Uses only the standard library, because packages may be missing."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from typing import Any


def installed() -> dict[str, str]:
    """Return the version of each installed package by its name."""
    found = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"]
        if name:  # a half-removed package leaves a folder without metadata
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), package.version)
    return found


def clashes(have: dict[str, str]) -> list[str]:
    """List installed packages that break Prefect although Prefect allows them, with the effect."""
    prefect, version = have.get("prefect", ""), have.get("sqlalchemy", "0")
    if not prefect.startswith("3.8.") or [int(part) for part in re.findall(r"\d+", version)[:2]] < [2, 1]:
        return []
    return [f"sqlalchemy {version} with prefect {prefect}: the server's scheduler fails, no schedule starts a run"]


def holds(marker: str, environment: dict[str, str]) -> bool:
    """Return whether an environment marker of the lock is true. Markers are Python expressions over a few names."""

    def value(node: ast.expr) -> str | bool:
        if isinstance(node, ast.BoolOp):
            return (all if isinstance(node.op, ast.And) else any)(value(operand) for operand in node.values)
        if isinstance(node, ast.Compare):
            assert isinstance(node.ops[0], (ast.Eq, ast.NotEq)), marker
            return (value(node.left) == value(node.comparators[0])) == isinstance(node.ops[0], ast.Eq)
        return environment[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)

    return bool(value(ast.parse(marker, mode="eval").body))


def locked(lock: dict[str, Any], extra: str) -> dict[str, str]:
    """Return the version by name of every package that `uv sync --extra EXTRA` installs on linux x86_64."""
    project = next(package for package in lock["package"] if "." in package["source"].values())
    packages = {}
    for package in lock["package"]:  # a dependency names the version only if the lock holds several
        packages[package["name"], package["version"]] = packages[package["name"], None] = package
    environment = {
        "extra": f"extra-{len(project['name'])}-{project['name']}-{extra}",  # uv's name for one of conflicting extras
        "implementation_name": "cpython",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
    }
    wanted, seen = {}, set()
    pending = [*project["dependencies"], *project["optional-dependencies"][extra], *project["dev-dependencies"]["dev"]]
    while pending:
        need = pending.pop()
        key = (need["name"], need.get("version"), tuple(need.get("extra", ())))
        if key in seen or not holds(need.get("marker", "True"), environment):
            continue
        seen.add(key)
        package = packages[key[:2]]
        wanted[package["name"]] = package["version"]
        pending += package.get("dependencies", [])
        for name in key[2]:
            pending += package.get("optional-dependencies", {}).get(name, [])
    return wanted
