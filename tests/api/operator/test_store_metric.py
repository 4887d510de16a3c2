"""chorale:response_store_up: whether responses can be stored."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from chorale.store.store import SqliteStore
from tests.support.server import served


async def test_the_metric_follows_the_store(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite3"
    async with served(store=SqliteStore(str(path), lock_seconds=0.2)) as server:
        http = server.http

        async def up() -> str:
            lines = (await http.get("/metrics")).text.splitlines()
            return next(line for line in lines if line.startswith("chorale:response_store_up"))[-3:]

        assert await up() == "1.0"
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert (await http.post("/v1/conversations", json={})).status_code == 503
        assert await up() == "0.0"
        other.close()
        assert (await http.post("/v1/conversations", json={})).status_code == 200
        assert await up() == "1.0"
