"""Validation of objects by Kubernetes' own types, with messages like the API server's.

The types come from two packages that are generated from the API's schemas: kubernetes_asyncio for Kubernetes' kinds,
kubeflow_trainer_api for JobSet v1alpha2. Rules between fields that schemas cannot hold follow in _rules: names, labels,
selectors, volumes and quantities.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from kubernetes_asyncio.client import models

NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i?|[munk])?")
PLAIN = {"str": str, "bool": bool, "int": int, "float": (int, float), "datetime": str, "date": str, "bytes": str}
LOOSE = ("object", "IntOrString")


def problems(version: str, kind: str, content: dict[str, Any]) -> list[str]:
    if content.get("apiVersion", version) != version:
        return [f"apiVersion: {content.get('apiVersion')}, but the request's is {version}"]
    found = [*_jobset(content)] if kind == "JobSet" else [*_typed(_model(version, kind), content, "")]
    return found or [*_rules(kind, content)]


@cache
def _model(version: str, kind: str) -> str:
    group, _, number = version.rpartition("/")
    name = f"{number[0].upper()}{number[1:]}{kind}"
    return "CoreV1Event" if name == "V1Event" else name if hasattr(models, name) and "x-k8s" not in group else "object"


def _jobset(content: dict[str, Any]) -> Iterator[str]:
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
    from pydantic import ValidationError

    try:
        known = JobsetV1alpha2JobSet.from_dict(content)
    except ValidationError as error:
        for one in error.errors():
            yield f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
        return
    assert known
    yield from _lost(content, known.to_dict(), "")


def _lost(content: Any, known: Any, path: str) -> Iterator[str]:
    """Fields that a type did not keep."""
    if isinstance(content, dict) and isinstance(known, dict):
        for key, value in content.items():
            if key in known:
                yield from _lost(value, known[key], f"{path}.{key}".lstrip("."))
            elif value not in ({}, []):
                yield f"{path}.{key}: unknown field".lstrip(".")
    elif isinstance(content, list) and isinstance(known, list):
        for place, pair in enumerate(zip(content, known, strict=True)):
            yield from _lost(*pair, f"{path}[{place}]")


def _typed(type_: str, content: Any, path: str) -> Iterator[str]:
    listed, mapped = re.fullmatch(r"list\[(.+)\]", type_), re.fullmatch(r"dict\(str, (.+)\)", type_)
    if type_ in LOOSE or content is None:
        return
    if listed or mapped:
        if not isinstance(content, list if listed else dict):
            yield f"{path}: must be {'a list' if listed else 'a map'}, not {content!r}"
        elif listed:
            for place, value in enumerate(content):
                yield from _typed(listed[1], value, f"{path}[{place}]")
        elif mapped:
            for key, value in content.items():
                yield from _typed(mapped[1], value, f"{path}[{key}]")
    elif type_ in PLAIN:
        wrong_number = isinstance(content, bool) and type_ != "bool"
        if not isinstance(content, PLAIN[type_]) or wrong_number:
            yield f"{path}: must be {type_}, not {content!r}"
    elif not isinstance(content, dict):
        yield f"{path}: must be a map, not {content!r}"
    else:
        yield from _fields(type_, content, path)


def _fields(type_: str, content: dict[str, Any], path: str) -> Iterator[str]:
    model = getattr(models, type_)
    names = {json_name: name for name, json_name in model.attribute_map.items()}
    for key, value in content.items():
        place = f"{path}.{key}".lstrip(".")
        if key not in names:
            yield f"{place}: unknown field"
        else:
            yield from _typed(model.openapi_types[names[key]], value, place)
    given = {names[key]: value for key, value in content.items() if key in names}
    try:
        model(**given)
    except ValueError as error:  # a required field is missing, or a value is not one of the allowed
        yield f"{path or type_}: {error}"


def _rules(kind: str, content: dict[str, Any]) -> Iterator[str]:
    metadata, spec = content.get("metadata", {}), content.get("spec") or {}
    if not NAME.fullmatch(metadata.get("name", "")):
        yield f"metadata.name: {metadata.get('name')!r} is not a name"
    for labels, path in (*_labels(content, ""),):
        for key, value in labels.items():
            if not LABEL_KEY.fullmatch(key) or not LABEL.fullmatch(value):
                yield f"{path}: {key}={value} is not a label"
    if kind in ("Deployment", "StatefulSet"):
        wanted = spec["selector"].get("matchLabels", {})
        if not wanted or not wanted.items() <= spec["template"]["metadata"].get("labels", {}).items():
            yield "spec.selector: does not match the labels of the template"
    for pod, path in _pods(kind, spec):
        yield from _pod(pod, path, {one["metadata"]["name"] for one in spec.get("volumeClaimTemplates", ())})


def _labels(content: Any, path: str) -> Iterator[tuple[dict[str, str], str]]:
    if isinstance(content, dict):
        for key, value in content.items():
            if key in ("labels", "matchLabels", "nodeSelector") and isinstance(value, dict):
                yield value, f"{path}.{key}".lstrip(".")
            yield from _labels(value, f"{path}.{key}")
    elif isinstance(content, list):
        for place, value in enumerate(content):
            yield from _labels(value, f"{path}[{place}]")


def _pods(kind: str, spec: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    if kind == "Pod":
        yield spec, "spec"
    elif kind in ("Deployment", "StatefulSet", "Job"):
        yield spec["template"]["spec"], "spec.template.spec"
    for place, job in enumerate(spec.get("replicatedJobs", ())):
        yield job["template"]["spec"]["template"]["spec"], f"spec.replicatedJobs[{place}].template.spec.template.spec"


def _pod(pod: dict[str, Any], path: str, claims: set[str]) -> Iterator[str]:
    volumes = claims | {volume["name"] for volume in pod.get("volumes", ())}
    for container in pod["containers"]:
        place = f"{path}.containers[{container['name']}]"
        if not container.get("image"):
            yield f"{place}.image: required"
        mounts = [mount["name"] for mount in container.get("volumeMounts", ())]
        yield from (f"{place}.volumeMounts: no volume {name}" for name in sorted({*mounts} - volumes))
        paths = Counter(mount["mountPath"] for mount in container.get("volumeMounts", ()))
        yield from (f"{place}.volumeMounts: {name} must be unique" for name, n in paths.items() if n > 1)
        ports = {port["name"] for port in container.get("ports", ()) if "name" in port}
        yield from (f"{place}.ports: {name} has more than 15 characters" for name in ports if len(name) > 15)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            port = container.get(probe, {}).get("httpGet", {}).get("port")
            if isinstance(port, str) and port not in ports:
                yield f"{place}.{probe}: no port {port}"
        resources = container.get("resources", {})
        for amounts in resources.values():
            for name, amount in amounts.items():
                if not QUANTITY.fullmatch(str(amount)):
                    yield f"{place}.resources: {name}: {amount!r} is not a quantity"
        for name, amount in resources.get("requests", {}).items():
            if "/" in name and resources.get("limits", {}).get(name) != amount:
                yield f"{place}.resources: {name}: the limit must equal the request"
