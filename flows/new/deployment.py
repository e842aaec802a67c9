"""Deployment of a new configuration, added as text at the end of prefect.own.yaml. The rest of the file stays."""

import contextlib
from pathlib import Path

import yaml
from jinja2 import Template

from conf.schema.named import POOLS
from contract.faults import Fault

NAME = "prefect.own.yaml"
ENTRY = Path(__file__).with_suffix(".yaml.j2")
HEAD = """\
# Deployments of this checkout, next to those of prefect.yaml and with the same keys. git ignores this file.
# python -m flows.deploy and make up read both; a deployment here replaces one of the same name there.
deployments:
"""


def with_deployment(text: str, name: str, description: str, cuda: bool) -> str:
    """Return the file's text, which may be empty, with an entry for `name`. An existing entry is kept."""
    text = text if text.strip() else HEAD
    before = listed(text, NAME)
    if any(one["name"] == name for one in before):
        return text
    pool = "gpu" if cuda else "cpu"
    description = yaml.safe_dump(description, width=10**6).strip().removesuffix("...").strip()
    made = Template(ENTRY.read_text()).render(name=name, description=description, pool=pool, work_pool=POOLS[pool])
    whole = text.rstrip("\n") + "\n" + made + "\n"
    after = []
    with contextlib.suppress(Fault, yaml.YAMLError):
        after = listed(whole, NAME)
    if not after or after[:-1] != before or after[-1].get("parameters") != {"conf": name}:
        raise Fault(f"{NAME}: no entry can be added; docs/reference/configuration.md shows the lines")
    return whole


def listed(text: str, name: str) -> list[dict]:
    """Return the deployments in the text of a file. `name` is the file's name, for errors."""
    found = yaml.safe_load(text)
    entries = found["deployments"] or [] if isinstance(found, dict) and "deployments" in found else None
    if not isinstance(entries, list) or not all(isinstance(one, dict) and "name" in one for one in entries):
        raise Fault(f"{name}: must have a list `deployments`, each with a name")
    return entries
