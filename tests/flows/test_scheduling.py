"""What keeps schedules from running is said, by `make doctor` and `make up`; a healthy server is not accused."""

import json
import os
import subprocess
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from contract.processes import started
from flows import doctor, packages, scheduling, services
from tasks.servers import prefect_server
from tests.support.flow_world import BIN, World, end, free_port, wait_for

# What Prefect 3.8.8 wrote with SQLAlchemy 2.1.9, shortened: NOW is when.
DEAD = """NOW.819 | ERROR   | docket.dependencies - ↩ [ 97ms] schedule_recent_deployments(){schedule_recent}
Traceback (most recent call last):
  File "prefect/server/services/scheduler.py", line 348, in schedule_recent_deployments
    inserted_runs = await models.deployments._insert_scheduled_flow_runs(
  File "sqlalchemy/ext/hybrid.py", line 1851, in prop
    raise exc.InvalidRequestError(
sqlalchemy.exc.InvalidRequestError: Can't evaluate bulk DML statement; please supply a bulk_dml decorated function
"""
REQUEST = "NOW.001 | ERROR   | uvicorn.error - Exception in ASGI application\nRuntimeError: No response returned.\n"
# A copy of that fault in this server: the scheduler's last step raises.
PLANTED = """
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "prefect.server.models.deployments":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            async def fail(*arguments, **named):
                raise RuntimeError("planted: Can't evaluate bulk DML statement")
            module._insert_scheduled_flow_runs = fail
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def ago(seconds: float, text: str) -> str:
    return text.replace("NOW", time.strftime("%H:%M:%S", time.localtime(time.time() - seconds)))


@pytest.fixture
def log(tmp_path):
    return tmp_path / "prefect.log"


def test_a_service_that_fails_again_and_again_is_named_with_its_reason(log):
    log.write_text("\n".join(ago(seconds, DEAD) for seconds in (120, 60, 1)))
    (trouble,) = scheduling.failing_services(log)
    assert trouble.is_fatal
    assert trouble.fact.startswith("schedule_recent_deployments failed 3 times in 150 s: sqlalchemy.exc.Invalid")
    assert "bulk DML" in trouble.fact


@pytest.mark.parametrize(
    "text",
    [
        "",
        ago(1, DEAD),  # one failure: the next turn may do
        ago(7200, DEAD) + ago(7140, DEAD),  # mended since
        ago(2, REQUEST) + ago(1, REQUEST),  # a client that went away
        ago(2, REQUEST.replace("uvicorn.error", "prefect.server.utilities.worker_channel")) * 2,
        ago(2, DEAD) + ago(1, DEAD.replace("schedule_recent_deployments", "monitor_late_runs")),  # each once
    ],
)
def test_a_healthy_server_s_log_accuses_nobody(log, text):
    log.write_text(text)
    assert scheduling.failing_services(log) == []


def test_a_host_that_is_too_busy_is_a_warning_alone(log):
    """Seen on one with a load of 30: a healthy server's services, that find SQLite locked twice in a while."""
    busy = DEAD.replace(
        "sqlalchemy.exc.InvalidRequestError: Can't", "sqlalchemy.exc.OperationalError: database is locked"
    )
    log.write_text(ago(30, busy) + ago(1, busy))
    (trouble,) = scheduling.failing_services(log)
    assert not trouble.is_fatal
    assert "database is locked" in trouble.fact


def test_errors_of_the_server_before_this_one_do_not_count(log):
    log.write_text(ago(3, DEAD) + ago(2, DEAD))
    begin = log.stat().st_size
    log.write_text(log.read_text() + ago(1, DEAD))
    assert scheduling.failing_services(log, begin) == []
    assert scheduling.failing_services(log)


def test_versions_that_do_not_go_together_are_named(monkeypatch):
    bad = {"prefect": "3.8.8", "sqlalchemy": "2.1.9"}
    assert packages.clashes(packages.installed()) == []
    assert packages.clashes({**bad, "sqlalchemy": "2.0.51"}) == packages.clashes({}) == []
    assert packages.clashes(bad) == [
        "sqlalchemy 2.1.9 with prefect 3.8.8: the server's scheduler fails, no schedule starts a run"
    ]
    monkeypatch.setattr(doctor, "installed", lambda: packages.installed() | bad)
    (finding,) = [one for one in doctor.environment("cpu") if "scheduler" in one.fact]
    assert (finding.status, finding.mend) == ("fail", "EXTRA=cpu sh setup.sh")


LONG_AGO = "2026-01-05T10:00:00.123456Z"


def deployment(name: str, *rules: dict, pool: str = "attended", **more: object) -> dict:
    schedules = [
        {"id": f"{name}-{at}", "active": True, "updated": LONG_AGO, "schedule": rule} for at, rule in enumerate(rules)
    ]
    return {
        "id": name, "name": name, "paused": False, "updated": LONG_AGO, "work_pool_name": pool, "schedules": schedules
    } | more  # fmt: skip


def run(schedule: str, name: str) -> dict:
    return {"deployment_id": name, "auto_scheduled": True, "created_by": {"id": schedule, "type": "SCHEDULE"}}


POOLS = [
    {"name": "attended", "is_paused": False, "status": "READY"},
    {"name": "deserted", "is_paused": False, "status": "NOT_READY"},
    {"name": "stopped", "is_paused": True, "status": "PAUSED"},
]


@contextmanager
def prefect(deployments: list[dict], coming: list[dict] = (), late: list[dict] = (), refusals: list[int] = ()):
    """A server that knows these, and refuses with these codes first; yields its address."""
    refused = iter(refusals)

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if code := next(refused, None):
                self.send_response(code)
                return self.end_headers()
            found = {"/api/deployments/filter": deployments, "/api/work_pools/filter": POOLS}.get(self.path)
            if found is None:
                between = asked["flow_runs"]["next_scheduled_start_time"]
                of = asked["flow_runs"].get("deployment_id", {"any_": [one["deployment_id"] for one in late]})["any_"]
                found = [one for one in (coming if "after_" in between else late) if one["deployment_id"] in of]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(found[asked["offset"] :][: asked["limit"]]).encode())

        def log_message(self, format, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/api"
        http.shutdown()


WEEKLY = {"cron": "0 3 * * 1", "timezone": "Europe/Berlin"}


def test_an_active_schedule_without_a_next_run_is_the_sign_of_a_dead_scheduler():
    known = [deployment("a", WEEKLY, {"interval": 3600.0}), deployment("b", WEEKLY)]
    with prefect(known, [run("a-0", "a")]) as api:
        (trouble,) = scheduling.unscheduled(api, scheduling.active(api))
    assert trouble.is_fatal
    assert trouble.fact.endswith("active schedules: a (each 3600 s), b (0 3 * * 1 Europe/Berlin)")


def test_more_runs_than_the_server_gives_at_once_are_all_seen():
    known = [deployment("a", {"cron": "* * * * *"}, WEEKLY)]
    with prefect(known, [run("a-0", "a")] * scheduling.PAGE + [run("a-1", "a")]) as api:
        assert scheduling.unscheduled(api, scheduling.active(api)) == []


@pytest.mark.parametrize(
    "rule",
    [{"cron": "0 0 1 1 *"}, {"cron": "0 0 30 2 *"}, {"cron": "@yearly"}, {"rrule": "FREQ=DAILY;COUNT=1"},
     {"interval": 365 * 86400.0}],
)  # fmt: skip
def test_a_schedule_that_may_have_no_next_run_is_no_sign(rule):
    with prefect([deployment("a", rule)]) as api:
        assert scheduling.unscheduled(api, scheduling.active(api)) == []


@pytest.mark.parametrize("known", [deployment("a", WEEKLY, paused=True), deployment("a")])
def test_what_is_off_needs_no_next_run(known):
    with prefect([known]) as api:
        assert scheduling.unscheduled(api, scheduling.active(api)) == []


def test_what_was_deployed_just_now_needs_no_next_run():
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with prefect([deployment("a", WEEKLY, updated=now)]) as api:
        assert scheduling.unscheduled(api, scheduling.active(api)) == []


def test_a_server_that_is_busy_is_asked_again(monkeypatch):
    monkeypatch.setattr(scheduling, "BUSY_WAITS", (0, 0, None))
    with prefect([deployment("a", WEEKLY)], refusals=[503] * 2) as api:
        assert [one["name"] for one in scheduling.active(api)] == ["a"]


@pytest.mark.parametrize(("refusals", "line"), [([503] * 3, "answers 503"), ([401], "answers 401")])
def test_a_server_that_refuses_is_said_to(monkeypatch, refusals, line):
    monkeypatch.setattr(scheduling, "BUSY_WAITS", (0, 0, None))
    with prefect([deployment("a", WEEKLY)], refusals=refusals) as api, pytest.raises(scheduling.Silent, match=line):
        scheduling.active(api)


def test_pools_that_nobody_works_for_are_named_once_a_schedule_is_on():
    known = [deployment("glm47", WEEKLY, pool="deserted"), deployment("tiny", WEEKLY, pool="stopped")]
    known += [deployment("calm", pool="deserted"), deployment("served", WEEKLY, pool=None)]
    with prefect(known, late=[run("tiny-0", "tiny")] * 3) as api:
        troubles = scheduling.unattended(api, scheduling.active(api))
    assert [(one.is_fatal, one.fact) for one in troubles] == [
        (False, "nobody takes scheduled runs of glm47: work pool deserted has no worker"),
        (False, "nobody takes scheduled runs of tiny: work pool stopped is paused"),
        (False, "runs are late, and all start once they are taken: 3 of tiny"),
    ]
    assert [one.mend for one in troubles[:2]] == [
        "prefect worker start --pool deserted",
        "prefect work-pool resume stopped",
    ]


def test_runs_started_by_hand_that_wait_for_a_worker_are_named():
    started = [
        {"deployment_id": name, "auto_scheduled": False, "work_pool_name": pool}
        for name, pool in [("a", "deserted"), ("b", "deserted"), ("c", "stopped"), ("d", "attended"), ("e", None)]
    ]
    with prefect([], late=[*started, run("f-0", "f") | {"work_pool_name": "deserted"}]) as api:
        troubles = scheduling.untaken(api)
    assert [(one.is_fatal, one.fact, one.mend) for one in troubles] == [
        (
            False,
            "work pool deserted has no worker, and runs that were started wait: 2",
            "prefect worker start --pool deserted",
        ),
        (False, "work pool stopped is paused, and runs that were started wait: 1", "prefect work-pool resume stopped"),
    ]


def test_the_doctor_asks_the_server_of_make_up_where_no_other_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path))
    healthy = doctor.Finding("ok", "prefect", "")
    assert [one.status for one in doctor.schedules(healthy)] == ["info"]
    (tmp_path / "prefect.log").write_text(ago(2, DEAD) + ago(1, DEAD))
    with prefect([deployment("a", WEEKLY)], [run("a-0", "a")]) as api:
        register(tmp_path, os.getpid(), api, tmp_path / "prefect.log")
        (finding,) = doctor.schedules(healthy)
        assert (finding.status, "schedule_recent_deployments failed 2 times" in finding.fact) == ("fail", True)
        (tmp_path / "prefect.log").write_text("")
        assert doctor.schedules(healthy)[0].fact == "1 active, each with a next run and a worker"


def register(runs, pid: int, api: str, log) -> dict:
    """As `make up` does."""
    (runs / "services").mkdir(exist_ok=True)
    address = api.removesuffix("/api")
    server = {"pid": pid, "started": started(pid), "address": address, "log": str(log), "log_from": 0}
    (runs / "services/processes.json").write_text(json.dumps({"prefect": server}))
    return server


def test_make_up_names_both_signs_of_a_dead_scheduler(monkeypatch, tmp_path, log):
    monkeypatch.setattr(services, "SCHEDULED_WITHIN", 0.1)
    log.write_text(ago(2, DEAD) + ago(1, DEAD))
    with prefect([deployment("a", WEEKLY)]) as api:
        up = register(tmp_path, os.getpid(), api, log)
        failing, unscheduled = services._troubles({"prefect": up}, api)
    assert failing.is_fatal and failing.fact.startswith("schedule_recent_deployments failed 2 times ")
    assert unscheduled.is_fatal and unscheduled.fact.endswith(
        "no next run of active schedules: a (0 3 * * 1 Europe/Berlin)"
    )


@pytest.mark.slow
def test_a_scheduler_that_raises_is_noticed_by_both_commands(tmp_path, monkeypatch, log):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted/sitecustomize.py").write_text(PLANTED)
    port = free_port()
    api = f"http://127.0.0.1:{port}/api"
    loops = {f"PREFECT_SERVER_SERVICES_SCHEDULER_{name}LOOP_SECONDS": "1" for name in ("", "RECENT_DEPLOYMENTS_")}
    environment = os.environ | loops | {
        "PYTHONPATH": str(tmp_path / "planted"), "PREFECT_HOME": str(tmp_path / "home"), "NO_COLOR": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }  # fmt: skip
    with log.open("w") as file:
        to_log = {"stdout": file, "stderr": file, "env": environment, "start_new_session": True, "cwd": tmp_path}
        server = subprocess.Popen([BIN / "prefect", "server", "start", "--port", str(port)], **to_log)
    try:
        wait_for(lambda: prefect_server.answers(f"{api}/health"), 250)
        world = World(tmp_path, {}, api, "")
        flow = world.ask_prefect("flows/", name="toy")
        schedules = [{"active": True, "schedule": {"cron": "* * * * *", "timezone": "UTC"}}]
        world.ask_prefect("deployments/", name="toy", flow_id=flow["id"], schedules=schedules)
        wait_for(lambda: log.read_text().count("RuntimeError: planted") > 3, 60)

        up = register(tmp_path, server.pid, api, log)
        monkeypatch.setattr(services, "SCHEDULED_WITHIN", 1.0)
        facts = [one.fact for one in services._troubles({"prefect": up}, api) if one.is_fatal]
        assert any("schedule_deployments failed " in fact and "RuntimeError: planted" in fact for fact in facts)
        assert any(fact.endswith("no next run of active schedules: toy (* * * * * UTC)") for fact in facts)

        monkeypatch.setattr(scheduling, "SETTLED", 0)
        monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path))
        monkeypatch.setenv("PREFECT_API_URL", api)
        found = doctor.schedules(doctor.service("prefect", "PREFECT_API_URL", ""))
        assert "fail" in {one.status for one in found}
        assert any("schedule_deployments failed " in one.fact for one in found)
    finally:
        end(server)
