"""A deployment of a new configuration, as text at the end of prefect.yaml: its comments and all else stay."""

import yaml

from contract.faults import Fault

FLOW = "flows/finetune.py:finetune"


def with_deployment(text: str, name: str, description: str, cuda: bool) -> str:
    """The file with an entry for conf/NAME.yaml. An entry of that name that is there stays as it is."""
    before = _deployments(text)
    if any(one["name"] == name for one in before):
        return text
    pool = "gpu" if cuda else "cpu"
    made = (
        f"\n  - name: {name}\n"
        f"    description: {yaml.safe_dump(description, width=10**6).strip().removesuffix('...').strip()}\n"
        f"    entrypoint: {FLOW}\n"
        f"    parameters: {{conf: {name}}}\n"
        f"    work_pool: *{pool}\n"
        f"    tags: [{pool}]\n"
        f"    concurrency_limit: *one-at-a-time\n"
    )
    whole = text.rstrip("\n") + "\n" + made
    try:
        after = _deployments(whole)
    except (Fault, yaml.YAMLError):
        after = []
    if after[:-1] != before or after[-1].get("parameters") != {"conf": name}:
        raise Fault("prefect.yaml: has been changed so that no entry can be added; docs/configuration.md has its lines")
    return whole


def _deployments(text: str) -> list[dict]:
    found = yaml.safe_load(text)
    listed = found.get("deployments") if isinstance(found, dict) else None
    if not isinstance(listed, list) or not all(isinstance(one, dict) and "name" in one for one in listed):
        raise Fault("prefect.yaml: no list of deployments with names")
    return listed
