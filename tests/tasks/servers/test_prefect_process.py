"""tasks/servers/prefect_process.py: no write is refused as another one is under way; the server of `make up` stays."""

import asyncio
import json
import os
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa

from contract.processes import started


@pytest.fixture
def prefect_process():
    """The module, whose import takes seconds of each worker that only collects tests."""
    from tasks.servers import prefect_process

    return prefect_process


def read_and_write(path: Path) -> list[BaseException | None]:
    """Do twice at once what a request that creates a run does: read, think, write."""
    from prefect.server.database.configurations import AioSqliteConfiguration

    async def one(config: AioSqliteConfiguration) -> None:
        async with await config.session(await config.engine()) as session, config.begin_transaction(session):
            (count,) = (await session.execute(sa.text("select count(*) from runs"))).one()
            await asyncio.sleep(0.2)
            await session.execute(sa.text(f"insert into runs values ({count})"))

    async def both() -> list[BaseException | None]:
        config = AioSqliteConfiguration(connection_url=f"sqlite+aiosqlite:///{path}", timeout=10)
        return [*await asyncio.gather(one(config), one(config), return_exceptions=True)]

    with sqlite3.connect(path) as database:
        database.execute("create table runs (number)")
    return asyncio.run(both())


def test_transactions_that_read_before_they_write_take_turns(prefect_process, tmp_path, monkeypatch):
    configuration = prefect_process.AioSqliteConfiguration
    monkeypatch.setattr(configuration, "begin_transaction", configuration.begin_transaction)
    before = read_and_write(tmp_path / "before.db")
    assert "database is locked" in str(before), "Prefect does so now: _take_turns can go"
    prefect_process._take_turns()
    assert read_and_write(tmp_path / "after.db") == [None, None]
    with sqlite3.connect(tmp_path / "after.db") as database:
        assert sorted(database.execute("select number from runs")) == [(0,), (1,)]


@pytest.mark.parametrize(
    ("content", "stays"),
    [(None, False), ({}, True), ({"started": "1"}, False), ({"pid": 1}, False), ("{", False), ("[]", False)],
)
def test_a_server_that_make_up_lists_stays_without_users(prefect_process, tmp_path, content, stays):
    me = {"pid": os.getpid(), "started": started(os.getpid())}
    listed = tmp_path / "processes.json"
    if isinstance(content, dict):
        content = json.dumps({"prefect": me | {"address": "x"} | content})
    if content:
        listed.write_text(content)
    assert prefect_process._lists(listed, me) == stays
