"""A deployment of a new configuration, as text at the end of prefect.own.yaml: its comments and all else stay."""

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
    """The file, which may be empty, with an entry for NAME. An existing entry of that name stays."""
    text = text if text.strip() else HEAD
    before = listed(text, NAME)
    if any(one["name"] == name for one in before):
        return text
    pool = "gpu" if cuda else "cpu"
    description = yaml.safe_dump(description, width=10**6).strip().removesuffix("...").strip()
    made = Template(ENTRY.read_text()).render(name=name, description=description, pool=pool, work_pool=POOLS[pool])
    whole = text.rstrip("\n") + "\n" + made + "\n"
    try:
        after = listed(whole, NAME)
    except (Fault, yaml.YAMLError):
        after = []
    if not after or after[:-1] != before or after[-1].get("parameters") != {"conf": name}:
        raise Fault(f"{NAME}: no entry can be added to it; docs/reference/configuration.md has its lines")
    return whole


def listed(text: str, name: str) -> list[dict]:
    """Deployments of a file of this name."""
    found = yaml.safe_load(text)
    entries = found["deployments"] or [] if isinstance(found, dict) and "deployments" in found else None
    if not isinstance(entries, list) or not all(isinstance(one, dict) and "name" in one for one in entries):
        raise Fault(f"{name}: no list of deployments with names")
    return entries
