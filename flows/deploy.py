"""Deploy prefect.yaml and prefect.own.yaml to the Prefect server, and keep edits that were made there.

    python -m flows.deploy [NAME ...]        all deployments or the named ones, and the automations
    python -m flows.deploy --image REGISTRY/finetune     with an image for each work pool of type kubernetes

The server is that of PREFECT_API_URL, or this checkout's. A new deployment starts with its `first_schedules`. After
that the server owns its schedules: neither this command nor `prefect deploy --all` changes them, because prefect.yaml
has no `schedules`. The command also keeps other edits since the last deployment, in the UI or elsewhere: parameters,
limits, and whether a deployment is paused. It prints each difference from prefect.yaml. Values that nobody has edited
follow prefect.yaml. An unchanged deployment is not written again, because Prefect's server would then drop the run that
is due next. The version of a deployment is the commit of the code, so a new commit writes all deployments.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import prefect
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, VariableCreate, VariableUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound

from conf.load import load
from contract import checksums, closed_pipe
from contract.faults import Fault
from contract.installation import CODE, FILES, home
from flows import arguments, automations, images
from flows.arguments import reports_faults
from flows.new.deployment import listed
from tasks.pages import deployment_form

ROOT = home()  # workers run flows there
FILE = FILES / "prefect.yaml"
OWN = ROOT / "prefect.own.yaml"  # the user's own deployments, which git ignores; they replace equal names
FIRST = "first_schedules"  # not Prefect's key `schedules`, with which Prefect replaces all schedules of a deployment
# Prefix of the variables on the server. Each deployment has one, with digests of the values that it set last, because a
# variable holds only 5000 characters. Older servers have one variable of this name for all deployments.
DEPLOYED = "finetune_deployed"
DECLARED = "declared"  # key of the digest of the whole declaration: the entry in prefect.yaml and the flow's parameters
# Fields that the form in Prefect's UI edits.
EDITABLE = ("paused", "parameters", "tags", "description", "job_variables")
LIMIT = "concurrency_limit"


@reports_faults
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments.deploy().parse_args(argv)
    names = options.names
    wanted = declared()
    there = [deployment["name"] for deployment in wanted["deployments"]]
    if unknown := {*names} - {*there}:
        known = f"not in {FILE.name} or {OWN.name}, which have {', '.join(there)}"
        raise Fault(f"{', '.join(sorted(unknown))}: {known}")
    wanted["deployments"] = [one for one in wanted["deployments"] if not names or one["name"] in names]
    with automations.connected() as client:
        if options.image:
            images.build(client, wanted, options.image)
        failed = deploy(client, wanted)
    return failed or automations.main([])


def declared() -> dict:
    """Return the content of prefect.yaml, with the deployments of prefect.own.yaml."""
    wanted = yaml.safe_load(FILE.read_text())
    try:
        own = listed(OWN.read_text(), OWN.name) if OWN.exists() else []
    except yaml.YAMLError as error:
        raise Fault(f"{OWN.name}: not YAML: {' '.join(str(error).split())}") from None
    names = {one["name"] for one in own}
    return wanted | {"deployments": [one for one in wanted["deployments"] if one["name"] not in names] + own}


def deploy(client: SyncPrefectClient, wanted: dict) -> int:
    """Run `prefect deploy` for changed deployments. Print the reason of a failure, and return the exit code."""
    changes = []  # for each deployment to write: its new state and the state before
    for deployment in wanted["deployments"]:
        name = f"{deployment['entrypoint'].rpartition(':')[2]}/{deployment['name']}"
        first = deployment.pop(FIRST, [])
        deployment["version"] = images.version()
        parameters = parameters_of(deployment["entrypoint"])
        before, now = read_deployed(client, name), digest([prefect.__version__, str(ROOT), deployment, parameters])
        there = find(client, name)
        edited = keep(name, deployment, edits(there, before)) if there else set()
        shown = form(deployment, parameters)
        same = there and (shown is None or digest(there.parameter_openapi_schema) == digest(shown))
        if same and before.get(DECLARED) == now:
            continue
        if not there:
            deployment["schedules"] = first
        changes.append((name, deployment, edited, before or UNEDITED, now, shown))
    if not changes:
        return 0
    wanted["deployments"] = [deployment for _, deployment, *_ in changes]
    for deployment in wanted["deployments"]:
        if CODE != ROOT and "/" in deployment["entrypoint"]:  # a wheel's flows are not below the workers' folder
            deployment["entrypoint"] = f"{CODE}/{deployment['entrypoint']}"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(wanted, file, sort_keys=False)
        file.flush()
        command = [str(Path(sys.executable).parent / "prefect"), "--no-prompt", "deploy", "--all"]
        done = subprocess.run([*command, "--prefect-file", file.name], cwd=ROOT, capture_output=True, text=True)
    there = {name: find(client, name) for name, *_ in changes}
    if done.returncode or None in there.values():
        print(f"error: prefect deploy: {done.stdout}{done.stderr}", file=sys.stderr)
        return done.returncode or 1
    for name, _, edited, before, declaration, shown in changes:
        values = {field: digest(value) for field, value in editable(there[name]).items()}
        values |= {field: before[field] for field in edited}
        write_deployed(client, name, values | {DECLARED: declaration})
        if shown is not None:
            client.update_deployment(there[name].id, DeploymentUpdate(parameter_openapi_schema=shown))
    return 0


@cache
def parameters_of(entrypoint: str) -> dict:
    """Return the schema of a flow's parameters."""
    file, _, flow = entrypoint.partition(":")
    module = ".".join(Path(file.removesuffix(".py")).parts)
    return getattr(importlib.import_module(module), flow).parameters.model_dump_for_openapi()


def form(deployment: dict, parameters: dict) -> dict | None:
    """Return the form with the values of the deployment's configuration, or None if it has no configuration."""
    conf = deployment.get("parameters", {}).get("conf")
    return deployment_form.with_values(parameters, load(conf)) if conf else None


def find(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def editable(there: DeploymentResponse) -> dict:
    limit = there.global_concurrency_limit
    return {field: getattr(there, field) for field in EDITABLE} | {LIMIT: limit.limit if limit else None}


def edits(there: DeploymentResponse, deployed: dict[str, str]) -> dict:
    """Return the values that were edited on the server since the last deployment."""
    before = deployed or UNEDITED
    return {name: value for name, value in editable(there).items() if before.get(name, digest(value)) != digest(value)}


def keep(name: str, deployment: dict, edited: dict) -> set[str]:
    """Put edited values into the deployment. Return the names of the values that differ from prefect.yaml."""
    kept = set()
    for field, value in edited.items():
        holder, key = deployment, field
        if field == "job_variables":
            holder = deployment["work_pool"] = {**deployment["work_pool"]}  # a copy: YAML's aliases share one object
        elif field == LIMIT and isinstance(deployment.get(field), dict):
            holder = deployment[field] = {**deployment[field]}
            key = "limit"
        if holder.get(key) != value:
            declared = json.dumps(holder[key]) if key in holder else "nothing"
            print(f"{name}: {field} stays as edited, {json.dumps(value)}; prefect.yaml has {declared}")
            holder[key] = value
            kept.add(field)
    return kept


def remembered(name: str) -> str:
    """Return the name of a deployment's variable."""
    return f"{DEPLOYED}_{checksums.of(name)[:12]}"


def read_deployed(client: SyncPrefectClient, name: str) -> dict[str, str]:
    """Return the digests of the values that this deployment set last; empty if unknown."""
    own, of_all = (client.read_variable_by_name(variable) for variable in (remembered(name), DEPLOYED))
    if own and isinstance(own.value, dict):
        return own.value
    return of_all.value.get(name, {}) if of_all and isinstance(of_all.value, dict) else {}


def write_deployed(client: SyncPrefectClient, name: str, digests: dict[str, str]) -> None:
    variable, value = remembered(name), {"deployment": name} | digests
    if client.read_variable_by_name(variable):
        client.update_variable(VariableUpdate(name=variable, value=value))
    else:
        client.create_variable(VariableCreate(name=variable, value=value))


def digest(value: object) -> str:
    return checksums.of_json(value)[:6]


# Digests if the last deployment is unknown: not paused, because prefect.yaml never pauses a deployment and each
# `prefect deploy` ends a pause.
UNEDITED = {"paused": digest(False)}


if __name__ == "__main__":
    closed_pipe.run(main)
