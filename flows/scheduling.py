"""Check that a Prefect server starts scheduled runs, and find the reasons if it does not.

flows/doctor.py and `make up` report these findings. The checks look for errors that the server of `make up` logs
repeatedly, active schedules without a next run, and due runs that no worker has taken. They print no part of an
address, and use only the standard library of Python 3.8.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import base64
import calendar
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from contract.processes import started

RECENT = 150  # seconds: twice as long as the longest of the server's loops, and a margin
SETTLED = 90  # seconds after a change of a schedule; the scheduler checks all schedules every 60
BUSY_WAITS = (0.5, 2, 5, None)  # seconds after each 503
TAIL = 10**6  # bytes of a log
PAGE = 200  # most items in an answer of the server
LATE = 60  # seconds; a worker looks for runs every 10
LOGGED = re.compile(r"(\d\d):(\d\d):(\d\d)\.\d+ \| (?:ERROR|CRITICAL) *\| (\S+) - (.*)")
OF_SERVICES = (
    "docket",
    "prefect.server.services",
    "prefect.server.events",
)  # other loggers report errors of single requests
BUSY = "database is locked"  # SQLite on a busy host; the next attempt may succeed


class Trouble(NamedTuple):
    is_fatal: bool  # schedules, or another service of the server, do not work
    fact: str
    mend: str


class Silent(Exception):
    """The server does not answer, or refuses this caller."""


def of_make_up(runs: Path) -> dict | None:
    """Return the server that `make up` started, if it runs: its address, its start time, and where its log begins."""
    try:
        server = json.loads((runs / "services/processes.json").read_text())["prefect"]
    except (OSError, ValueError, KeyError):
        return None
    return server if started(server["pid"]) == server["started"] else None


def failing_services(log: Path, start: int = 0) -> list[Trouble]:
    """List services that failed more than once in the last RECENT seconds. The log of this server begins at `start`.

    A service that failed once is not listed, because it continues with its next round.
    """
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start if start <= size else 0, size - TAIL))  # the log was emptied
        lines = file.read().decode(errors="replace").splitlines()
    counts, reasons, service = Counter(), {}, ""
    for line in lines:
        found = LOGGED.match(line)
        if found:
            hour, minute, second, logger, message = found.groups()
            now = time.localtime()
            age = (now.tm_hour - int(hour)) * 3600 + (now.tm_min - int(minute)) * 60 + now.tm_sec - int(second)
            is_one = logger.startswith(OF_SERVICES) and age % 86400 <= RECENT
            service = _service(logger, message) if is_one else ""
            counts[service] += 1
            reasons[service] = message
        elif re.match(r"\d\d:\d\d:\d\d\.\d+ \| ", line):
            service = ""
        elif service and re.match(r"[\w.]+(: |$)", line):  # the last line of a stack trace, without its indentation
            reasons[service] = line[:200]
    mend = f"less +G {log}"
    return [
        Trouble(BUSY not in reasons[service], f"{service} failed {count} times in {RECENT} s: {reasons[service]}", mend)
        for service, count in counts.items()
        if service and count > 1
    ]


def _service(logger: str, message: str) -> str:
    """Return the name of the failing service: docket logs the function's name; others use their module's logger."""
    called = re.search(r"(\w+)\(", message) if logger.startswith("docket") else None
    return called.group(1) if called else logger


def active(api: str) -> list[dict]:
    """Return unpaused deployments that have active schedules, with these schedules."""
    deployments = [one for one in _all(api, "deployments/filter", "deployments") if not one["paused"]]
    for deployment in deployments:
        deployment["schedules"] = [schedule for schedule in deployment["schedules"] if schedule["active"]]
    return [deployment for deployment in deployments if deployment["schedules"]]


def unscheduled(api: str, deployments: list[dict], settled: float | None = None) -> list[Trouble]:
    """List active schedules that are not new but have no next run: the scheduler does not work."""
    now, settled = time.time(), SETTLED if settled is None else settled
    dead = []
    for deployment in deployments:
        schedules = [schedule for schedule in deployment["schedules"] if _has_next(schedule["schedule"])]
        changed = max([deployment["updated"], *(schedule["updated"] for schedule in deployment["schedules"])])
        if not schedules or now - calendar.timegm(time.strptime(changed[:19], "%Y-%m-%dT%H:%M:%S")) < settled:
            continue
        made = {(run.get("created_by") or {}).get("id") for run in _scheduled(api, deployment, after_=_written(now))}
        dead += [f"{deployment['name']} ({_shown(one['schedule'])})" for one in schedules if one["id"] not in made]
    if not dead:
        return []
    fact = f"the server's scheduler does not work: no next run of active schedules: {_list(dead)}"
    return [Trouble(True, fact, "make down; make up  # if that does not help, see the server's log")]


def unattended(api: str, deployments: list[dict]) -> list[Trouble]:
    """List active schedules whose pool has no worker, and runs that no worker took in time."""
    troubles, late, due = [], [], _written(time.time() - LATE)
    for pool in _all(api, "work_pools/filter", "work_pools") if deployments else ():
        names = [deployment["name"] for deployment in deployments if deployment["work_pool_name"] == pool["name"]]
        if names and _lack(pool):
            fact = f"nobody takes scheduled runs of {_list(names)}: {_lack(pool)}"
            troubles.append(Trouble(False, fact, _worker(pool)))
    for deployment in deployments:
        if count := len(_scheduled(api, deployment, before_=due)):
            late.append(f"{count} of {deployment['name']}")
    if late:
        fact = f"runs are late, and all start once they are taken: {_list(late)}"
        troubles.append(Trouble(False, fact, "prefect flow-run ls --state Late  # and prefect flow-run cancel ID"))
    return troubles


def untaken(api: str) -> list[Trouble]:
    """List work pools without a worker in which started runs wait."""
    due = {"state": {"type": {"any_": ["SCHEDULED"]}}, "next_scheduled_start_time": {"before_": _written(time.time())}}
    waiting = Counter(
        run["work_pool_name"] for run in _all(api, "flow_runs/filter", "flow_runs", due) if not run["auto_scheduled"]
    )
    return [
        Trouble(False, f"{_lack(pool)}, and runs that were started wait: {waiting[pool['name']]}", _worker(pool))
        for pool in _all(api, "work_pools/filter", "work_pools")
        if waiting[pool["name"]] and _lack(pool)
    ]


def _lack(pool: dict) -> str:
    lack = "is paused" if pool["is_paused"] else "has no worker" if pool.get("status") == "NOT_READY" else ""
    return lack and f"work pool {pool['name']} {lack}"


def _worker(pool: dict) -> str:
    return f"prefect {'work-pool resume' if pool['is_paused'] else 'worker start --pool'} {pool['name']}"


def _has_next(rule: dict) -> bool:
    """Return whether a schedule certainly has a run in the next 100 days, which the scheduler creates in advance."""
    if "interval" in rule:
        return rule["interval"] <= 90 * 86400
    fields = rule.get("cron", "").split()
    if len(fields) != 5 or fields[3] != "*":
        return False  # once a year, @monthly, a calendar rule that may have ended
    return fields[2] in ("*", "?") or any(day.isdigit() and int(day) <= 28 for day in fields[2].split(","))


def _shown(rule: dict) -> str:
    if "cron" in rule:
        return f"{rule['cron']} {rule.get('timezone') or 'UTC'}"
    return f"each {rule['interval']:.0f} s"


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _written(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _scheduled(api: str, deployment: dict, **between: str) -> list[dict]:
    runs = {
        "deployment_id": {"any_": [deployment["id"]]},
        "state": {"type": {"any_": ["SCHEDULED"]}},
        "next_scheduled_start_time": between,
    }
    return [run for run in _all(api, "flow_runs/filter", "flow_runs", runs) if run["auto_scheduled"]]


def _all(api: str, path: str, kind: str, wanted: dict | None = None) -> list[dict]:
    found = []
    while len(found) % PAGE == 0:
        body = {"limit": PAGE, "offset": len(found)}
        if wanted:
            body[kind] = wanted
        page = _ask(f"{api}/{path}", body)
        if not page:
            break
        found += page
    return found


def request_to(url: str, method: str, body: bytes | None = None, account: str = "") -> urllib.request.Request:
    """Return a request whose header has the account in the address, else `account`."""
    parts = urlsplit(url)
    named, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(parts._replace(netloc=host).geturl(), body, method=method)
    if account := unquote(named) or account:
        request.add_header("Authorization", "Basic " + base64.b64encode(account.encode()).decode())
    return request


def _ask(url: str, body: dict) -> list[dict]:
    account = os.environ.get("PREFECT_API_AUTH_STRING", "")
    request = request_to(url, "POST", json.dumps(body).encode(), account)
    request.add_header("Content-Type", "application/json")
    if os.environ.get("PREFECT_API_KEY") and not request.has_header("Authorization"):
        request.add_header("Authorization", "Bearer " + os.environ["PREFECT_API_KEY"])
    for wait in BUSY_WAITS:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.loads(answer.read().decode())
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 503 or wait is None:
                raise Silent(f"answers {error.code}") from None
            time.sleep(wait)  # its database is locked
        except (OSError, ValueError, http.client.HTTPException):
            break
    raise Silent("does not answer")
