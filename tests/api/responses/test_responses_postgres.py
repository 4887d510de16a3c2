"""What only PostgreSQL has: connections that break, several writers, an address that is wrong."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from test_responses_store import make, opened

from chorale.api.responses.stored import StoreError
from chorale.errors import ConfigError


def test_a_broken_connection_is_opened_anew(database: str) -> None:
    import psycopg

    async def scenario() -> None:
        store = opened(database)
        first, second = make(), make()
        await store.put(first)
        with psycopg.connect(database, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'chorale'"
            )
        assert await store.get(first.id, b"") == first
        await store.put(second)
        assert await store.get(second.id, b"") == second
        assert (await store.stats()).num_responses == 2
        await store.close()

    asyncio.run(scenario())


def test_many_writers_keep_the_totals_exact(database: str) -> None:
    async def scenario() -> None:
        stores = [opened(database) for _ in range(4)]
        made = [[make(text=str(i)) for i in range(25)] for _ in stores]
        await asyncio.gather(
            *(store.put(one) for store, some in zip(stores, made, strict=True) for one in some)
        )
        await asyncio.gather(
            *(store.delete(some[0].id, b"") for store, some in zip(stores, made, strict=True))
        )
        for store, some in zip(stores, made[1:] + made[:1], strict=True):
            assert await store.get(some[3].id, b"") == some[3]
        stats = await stores[0].stats()
        assert stats.num_responses == 4 * 24
        for store, some in zip(stores, made, strict=True):
            for one in some:
                await store.delete(one.id, b"")
        stats = await stores[3].stats()
        assert (stats.num_responses, stats.num_bytes) == (0, 0)
        for store in stores:
            await store.close()

    asyncio.run(scenario())


def test_what_cannot_be_reached_is_said_without_the_password(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError, match="cannot open") as caught:
        opened(f"postgresql://me:hunter2@/nothing?host={tmp_path}")
    assert "hunter2" not in str(caught.value)


def test_newer_tables_are_refused(database: str) -> None:
    import psycopg

    asyncio.run(opened(database).close())
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute("UPDATE chorale.schema_version SET version = 99")
    with pytest.raises(ConfigError, match="format 99"):
        opened(database)


def test_the_driver_is_needed_only_for_its_url() -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from chorale.api.responses.store import open_store\n"
        "from chorale.config import ServerConfig\n"
        "open_store(ServerConfig(response_store=':memory:'))\n"
        "try: open_store(ServerConfig(response_store='postgresql:///x'))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ConfigError")
    assert "chorale[postgres]" in done.stdout
