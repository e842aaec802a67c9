"""A Kubernetes API server for tests. It keeps objects in memory and answers kubectl, helm and watches over HTTP.

    with running(folder) as server: subprocess.run(["kubectl", ...], env=os.environ | {"KUBECONFIG": server.config()})

It validates with Kubernetes' types (kubernetes_types.py), gives each write a resourceVersion, refuses a stale one with
409, streams watches with bookmarks, answers 410 for a version that it has forgotten, and authorises by the Roles and
RoleBindings that it holds. No controller runs in it: kubernetes_nodes.py plays those that gangs need. Objects of kinds
without types (Kueue's) are stored as they are.
"""

import contextlib
import copy
import json
import re
import ssl
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.support import kubernetes_types

ADMIN = "admin"  # this token may do everything; any other is NAMESPACE:NAME of a service account
REMEMBERED = 2000  # events, after which a watch from an older version gets 410
BOOKMARK_EACH = 1.0  # seconds without an event
CLUSTER = ("Namespace", "Node", "ClusterRole", "ClusterRoleBinding")
KINDS = {
    "v1": "Namespace Node Pod Service ConfigMap Secret ServiceAccount PersistentVolumeClaim Event",
    "apps/v1": "Deployment StatefulSet",
    "batch/v1": "Job",
    "policy/v1": "PodDisruptionBudget",
    "networking.k8s.io/v1": "NetworkPolicy",
    "rbac.authorization.k8s.io/v1": "Role RoleBinding ClusterRole ClusterRoleBinding",
    "jobset.x-k8s.io/v1alpha2": "JobSet",
    "kueue.x-k8s.io/v1beta1": "LocalQueue Workload",
}


def plural(kind: str) -> str:
    return kind.lower()[:-1] + "ies" if kind.endswith("y") else kind.lower() + "s"


RESOURCES = {(version, plural(kind)): kind for version, kinds in KINDS.items() for kind in kinds.split()}
PATH = re.compile(
    r"^/(?:api|apis)/(?P<version>v1|[a-z0-9.-]+/v[a-z0-9]+)(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>status|eviction))?$"
)
Key = tuple[str, str, str | None]  # version, resource, namespace


class Refused(Exception):
    def __init__(self, code: int, reason: str, message: str):
        super().__init__(message)
        self.code, self.reason = code, reason

    @property
    def status(self) -> dict[str, Any]:
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": str(self),
                "reason": self.reason, "code": self.code}  # fmt: skip


@dataclass
class Request:
    version: str
    resource: str
    namespace: str | None
    name: str | None
    sub: str | None
    query: dict[str, str]
    user: str

    @property
    def kind(self) -> str:
        return RESOURCES[self.version, self.resource]

    @property
    def about(self) -> str:
        group = self.version.rpartition("/")[0]
        return f"{self.resource}{'.' + group if group else ''} {json.dumps(self.name)}"


@dataclass
class Cluster:
    """The objects, and the writes since the start."""

    objects: dict[Key, dict[str, dict[str, Any]]] = field(default_factory=dict)
    events: list[tuple[int, str, Key, dict[str, Any]]] = field(default_factory=list)
    version: int = 0
    forgotten: int = 0  # the last version whose event is gone
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))
    before_write: Callable[[Request], None] = lambda request: None  # a test's fault

    def forget(self) -> None:
        """What etcd's compaction does to watches that come back late."""
        with self.changed:
            self.events.clear()
            self.forgotten = self.version

    def of(self, request: Request) -> dict[str, dict[str, Any]]:
        return self.objects.setdefault((request.version, request.resource, request.namespace), {})

    def everywhere(self, version: str, resource: str, namespace: str | None) -> list[dict[str, Any]]:
        return [
            found
            for (a, b, c), named in sorted(self.objects.items(), key=lambda item: str(item[0]))
            if (a, b) == (version, resource) and namespace in (None, c)
            for found in named.values()
        ]

    def get(self, request: Request) -> dict[str, Any]:
        found = self.of(request).get(request.name or "")
        if found is None:
            raise Refused(404, "NotFound", f"{request.about} not found")
        return found

    def write(self, request: Request, type_: str, content: dict[str, Any]) -> dict[str, Any]:
        """Keep the content as the newest version, or remove it. Watches see it."""
        if request.query.get("dryRun") == "All":
            return content
        self.version += 1
        content["metadata"]["resourceVersion"] = str(self.version)
        named, name = self.of(request), content["metadata"]["name"]
        metadata = content["metadata"]
        if "deletionTimestamp" in metadata and not metadata.get("finalizers") and request.kind != "Pod":
            type_ = "DELETED"
        if type_ == "DELETED":
            named.pop(name, None)
        else:
            named[name] = content
        key = (request.version, request.resource, request.namespace)
        self.events.append((self.version, type_, key, copy.deepcopy(content)))
        while len(self.events) > REMEMBERED:
            self.forgotten = self.events.pop(0)[0]
        self.changed.notify_all()
        return content

    def create(self, request: Request, content: dict[str, Any]) -> dict[str, Any]:
        metadata = content.setdefault("metadata", {})
        if "generateName" in metadata and "name" not in metadata:
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        if request.namespace:
            if metadata.setdefault("namespace", request.namespace) != request.namespace:
                raise Refused(400, "BadRequest", "the namespace of the object does not match the request's")
            if request.namespace not in self.objects.get(("v1", "namespaces", None), {}):
                raise Refused(404, "NotFound", f'namespaces "{request.namespace}" not found')
        self.check(request, content)
        request.name = metadata["name"]
        if metadata["name"] in self.of(request):
            raise Refused(409, "AlreadyExists", f"{request.about} already exists")
        if "resourceVersion" in metadata:
            raise Refused(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
        if request.kind == "Pod":
            content["status"] = {"phase": "Pending"}
        return self.write(request, "ADDED", content)

    def replace(self, request: Request, content: dict[str, Any]) -> dict[str, Any]:
        old = self.get(request)
        wanted = content.get("metadata", {}).get("resourceVersion")
        if wanted and wanted != old["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", f"Operation cannot be fulfilled on {request.about}: the object has been "
                          "modified; please apply your changes to the latest version and try again")  # fmt: skip
        if request.sub == "status":
            content = old | {"status": content.get("status", {})}
        else:
            content = content | ({"status": old["status"]} if "status" in old else {})
            content["metadata"] |= {key: old["metadata"][key] for key in ("uid", "creationTimestamp")}
            changed = content.get("spec") != old.get("spec")
            content["metadata"]["generation"] = old["metadata"].get("generation", 1) + changed
            self.check(request, content)
        return self.write(request, "MODIFIED", copy.deepcopy(content))

    def patch(self, request: Request, how: str, change: dict[str, Any]) -> dict[str, Any]:
        if "apply" in how and (request.name or "") not in self.of(request):
            return self.create(request, change)
        content = merged(copy.deepcopy(self.get(request)), change, by_name="merge-patch" not in how)
        return self.replace(request, content)

    def delete(self, request: Request, options: dict[str, Any]) -> dict[str, Any]:
        content = copy.deepcopy(self.get(request))
        version = options.get("preconditions", {}).get("resourceVersion", content["metadata"]["resourceVersion"])
        if version != content["metadata"]["resourceVersion"]:
            raise Refused(
                409, "Conflict", f"{request.about}: the resourceVersion of the precondition is not the newest"
            )
        metadata = content["metadata"]
        grace = options.get("gracePeriodSeconds", content.get("spec", {}).get("terminationGracePeriodSeconds", 30))
        foreground = options.get("propagationPolicy") == "Foreground"
        waits = request.kind == "Pod" and grace and content.get("spec", {}).get("nodeName")
        if foreground and "foregroundDeletion" not in metadata.get("finalizers", []):
            metadata.setdefault("finalizers", []).append("foregroundDeletion")
        if not waits and not metadata.get("finalizers"):
            return self.write(request, "DELETED", content)
        if "deletionTimestamp" not in metadata:
            metadata |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": grace}
        return self.write(request, "MODIFIED", content)

    def evict(self, request: Request) -> dict[str, Any]:
        """What kubectl drain asks for. A PodDisruptionBudget that allows nobody answers 429."""
        pod = self.get(request)
        labels = pod["metadata"].get("labels", {})
        for budget in self.everywhere("policy/v1", "poddisruptionbudgets", request.namespace):
            wanted = budget["spec"].get("selector", {}).get("matchLabels", {})
            if wanted.items() <= labels.items() and budget["spec"].get("maxUnavailable") == 0:
                raise Refused(
                    429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget."
                )
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "drain",
        }
        status = request.__class__(**(request.__dict__ | {"sub": "status"}))
        self.replace(status, merged(copy.deepcopy(pod), {"status": {"conditions": [condition]}}))
        return self.delete(request, {})

    def check(self, request: Request, content: dict[str, Any]) -> None:
        wrong = kubernetes_types.problems(request.version, request.kind, content)
        if wrong:
            raise Refused(422, "Invalid", f"{request.kind} {json.dumps(request.name)} is invalid: {'; '.join(wrong)}")

    def allows(self, request: Request, verb: str) -> bool:
        """RBAC, for a service account."""
        if request.user == ADMIN:
            return True
        group = request.version.rpartition("/")[0]
        for binding, role in (("rolebindings", "roles"), ("clusterrolebindings", "clusterroles")):
            place = request.namespace if role == "roles" else None
            roles = {one["metadata"]["name"]: one for one in self.everywhere(RBAC, role, place)}
            for bound in self.everywhere(RBAC, binding, place):
                names = {f"{one.get('namespace')}:{one['name']}" for one in bound.get("subjects", [])}
                for rule in roles.get(bound["roleRef"]["name"], {}).get("rules", []):
                    resource = f"{request.resource}/{request.sub}" if request.sub else request.resource
                    fits = group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
                    if request.user in names and fits and (role == "clusterroles" or place):
                        return True
        return False


RBAC = "rbac.authorization.k8s.io/v1"
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, format: str, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client has ended its watch
            super().handle_one_request()

    def do_GET(self) -> None:
        self._respond(self._read)

    def do_POST(self) -> None:
        self._respond(self._write)

    do_PUT = do_PATCH = do_DELETE = do_POST

    def _respond(self, answer: Callable[[], dict[str, Any] | None]) -> None:
        try:
            code, content = 201 if self.command == "POST" else 200, answer()
        except Refused as refused:
            code, content = refused.code, refused.status
        if content is not None:
            body = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _request(self) -> Request:
        url = urlsplit(self.path)
        match = PATH.match(url.path)
        if not match or (match["version"], match["resource"]) not in RESOURCES:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        query = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        user = self.headers.get("Authorization", "").removeprefix("Bearer ")
        request = Request(**match.groupdict(), query=query, user=user)
        verb = VERBS.get(self.command) or ("get" if request.name else "watch" if watches(request) else "list")
        if verb == "delete" and not request.name:
            verb = "deletecollection"
        with self.cluster.changed:
            if not self.cluster.allows(request, verb):
                raise Refused(403, "Forbidden", f'{request.about} is forbidden: User "{user}" cannot {verb} resource '
                              f'"{request.resource}" in the namespace "{request.namespace}"')  # fmt: skip
        return request

    def _read(self) -> dict[str, Any] | None:
        if (page := discovery(urlsplit(self.path).path)) is not None:
            return page
        request = self._request()
        if request.name:
            with self.cluster.changed:
                return copy.deepcopy(self.cluster.get(request))
        if watches(request):
            return self._watch(request)
        with self.cluster.changed:
            items = self.cluster.everywhere(request.version, request.resource, request.namespace)
            items = [copy.deepcopy(item) for item in items if selected(item, request.query)]
            metadata = {"resourceVersion": str(self.cluster.version)}
        return {"kind": f"{request.kind}List", "apiVersion": request.version, "metadata": metadata, "items": items}

    def _watch(self, request: Request) -> None:
        """Stream the events since a version, and a bookmark after each quiet second."""
        since = int(request.query.get("resourceVersion") or 0)
        until = time.monotonic() + float(request.query.get("timeoutSeconds") or 3600)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while time.monotonic() < until:
            with self.cluster.changed:
                late = since < self.cluster.forgotten
                found = [event for event in self.cluster.events if event[0] > since]
                if not found and not late:
                    self.cluster.changed.wait(BOOKMARK_EACH)
                    found = [event for event in self.cluster.events if event[0] > since]
                newest = self.cluster.version
            if late:
                gone = Refused(410, "Expired", f"too old resource version: {since} ({self.cluster.forgotten})")
                self._chunk({"type": "ERROR", "object": gone.status})
                break
            for version, type_, (a, b, namespace), content in found:
                since = version
                here = (a, b) == (request.version, request.resource) and request.namespace in (None, namespace)
                if here and selected(content, request.query):
                    self._chunk({"type": type_, "object": content})
            if not found and request.query.get("allowWatchBookmarks") in ("true", "1"):
                mark = {"kind": request.kind, "apiVersion": request.version}
                self._chunk({"type": "BOOKMARK", "object": mark | {"metadata": {"resourceVersion": str(newest)}}})
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def _write(self) -> dict[str, Any]:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request, cluster = self._request(), self.cluster
        if text.startswith(b"k8s\0"):  # helm's records of releases; HELM_DRIVER=memory makes none
            raise Refused(415, "UnsupportedMediaType", "this server reads JSON and YAML, not protobuf")
        content = yaml.safe_load(text) if text else {}
        if self.command in ("POST", "PUT") and (request.sub != "eviction") and content.get("kind") != request.kind:
            raise Refused(400, "BadRequest", f"{content.get('kind')} does not match the request's {request.kind}")
        with cluster.changed:
            cluster.before_write(request)
            if self.command == "POST":
                return cluster.evict(request) if request.sub == "eviction" else cluster.create(request, content)
            if self.command == "PUT":
                return cluster.replace(request, content)
            if self.command == "PATCH":
                return cluster.patch(request, self.headers.get("Content-Type", ""), content)
            if request.name:
                return cluster.delete(request, content | _options(request.query))
            items = cluster.everywhere(request.version, request.resource, request.namespace)
            for item in [item for item in items if selected(item, request.query)]:
                request.name = item["metadata"]["name"]
                cluster.delete(request, content)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}


def _options(query: dict[str, str]) -> dict[str, Any]:
    grace = {"gracePeriodSeconds": int(query["gracePeriodSeconds"])} if "gracePeriodSeconds" in query else {}
    return grace | ({"propagationPolicy": query["propagationPolicy"]} if "propagationPolicy" in query else {})


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def watches(request: Request) -> bool:
    return request.query.get("watch") in ("true", "1")


def selected(content: dict[str, Any], query: dict[str, str]) -> bool:
    """Whether an object fits labelSelector and fieldSelector: terms KEY=VALUE, KEY!=VALUE and KEY."""
    labels, fields = content["metadata"].get("labels", {}), {"metadata.name": content["metadata"]["name"]}
    for terms, values in ((query.get("labelSelector"), labels), (query.get("fieldSelector"), fields)):
        for term in filter(None, (terms or "").split(",")):
            key, sign, value = re.fullmatch(r"([^=!]+)(==|=|!=)?(.*)", term).groups()  # pyright: ignore
            has = values.get(key) == value if sign else key in values
            if has == (sign == "!="):
                return False
    return True


def merged(content: Any, change: Any, by_name: bool = True) -> Any:
    """A merge patch; lists of named entries are merged by name, as a strategic one does."""
    if isinstance(content, dict) and isinstance(change, dict):
        for key, value in change.items():
            if value is None:
                content.pop(key, None)
            else:
                content[key] = merged(content.get(key), value, by_name)
        return content
    named = by_name and isinstance(content, list) and isinstance(change, list)
    if named and all(isinstance(one, dict) and "name" in one for one in [*content, *change]):
        old = {one["name"]: one for one in content}
        return [*(old | {one["name"]: merged(old.get(one["name"]), one) for one in change}).values()]
    return change


def discovery(path: str) -> dict[str, Any] | None:
    """What clients read before they ask for an object."""
    groups = [version.split("/") for version in KINDS if "/" in version]
    if path == "/version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0", "platform": "linux/amd64"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [(name, {"groupVersion": f"{name}/{version}", "version": version}) for name, version in groups]
        found = [{"name": name, "versions": [entry], "preferredVersion": entry} for name, entry in versions]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version in KINDS:
        resources = [
            {"name": plural(kind), "singularName": kind.lower(), "namespaced": kind not in CLUSTER, "kind": kind,
             "verbs": ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]}
            for kind in KINDS[version].split()
        ]  # fmt: skip
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
    places = {f"{'apis' if '/' in version else 'api'}/{version}": version for version in KINDS}
    if path == "/openapi/v3":
        return {"paths": {place: {"serverRelativeURL": f"/openapi/v3/{place}"} for place in places}}
    if (version := places.get(path.removeprefix("/openapi/v3/"))) is not None:
        group, _, number = version.rpartition("/")  # enough for kubectl to leave the check of fields to the server
        strict = [{"name": "fieldValidation", "in": "query"}]
        paths = {
            f"/{version}/{plural(kind)}/{{name}}": {
                "patch": {
                    "parameters": strict,
                    "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
                    "responses": {},
                }
            }
            for kind in KINDS[version].split()
        }
        return {"openapi": "3.0.0", "info": {"title": "test", "version": "1"}, "paths": paths}
    return None


@dataclass(frozen=True)
class Server:
    url: str
    folder: Path
    cluster: Cluster | None = None  # None: another program is the server

    def config(self, token: str = ADMIN, namespace: str = "ml") -> str:
        """A file for KUBECONFIG, whose user is an administrator or NAMESPACE:NAME of a service account."""
        path = self.folder / f"kubeconfig-{token.replace(':', '-')}"
        place = {"server": self.url, "insecure-skip-tls-verify": True}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "clusters": [{"name": "test", "cluster": place}],
            "users": [{"name": "test", "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(content))
        return str(path)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    """A server with the namespaces default and ml. kubectl sends tokens over TLS only."""
    cluster, key = Cluster(), folder / "server.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test -days 2"
    subprocess.run([*command.split(), "-keyout", key, "-out", folder / "cert.pem"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", key)
    for name in ("default", "ml"):
        metadata = {"name": name, "uid": name, "resourceVersion": "0"}
        content = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        cluster.objects.setdefault(("v1", "namespaces", None), {})[name] = content
    handler = type("Bound", (Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield Server(f"https://127.0.0.1:{server.server_port}", folder, cluster)
    finally:
        server.shutdown()
        server.server_close()
