"""PostgreSQL only: broken connections, several writers, wrong addresses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from chorale.errors import ConfigError
from chorale.serve.precheck import check_store
from chorale.store.database.sql import Page
from chorale.store.protocol import StoredCompletion, StoreError
from tests.store.test_store import make, opened
from tests.support.responses import HELLO, serve


async def test_a_broken_connection_is_reopened(database: str) -> None:
    import psycopg

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


async def test_many_writers_keep_the_totals_exact(database: str) -> None:
    stores = [opened(database) for _ in range(4)]
    made = [[make(text=str(i)) for i in range(25)] for _ in stores]
    await asyncio.gather(*(store.put(one) for store, some in zip(stores, made, strict=True) for one in some))
    await asyncio.gather(*(store.delete(some[0].id, b"") for store, some in zip(stores, made, strict=True)))
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


async def test_conversations_and_completions_are_stored(database: str) -> None:
    """Runs every statement that the shared tests of the store do not run on PostgreSQL."""
    async with serve(HELLO, store=opened(database)) as server:
        api = server.sdk.conversations
        items = [{"type": "message", "role": "user", "content": str(i)} for i in range(3)]
        made = await api.create(metadata={"a": "b"}, items=items)  # type: ignore[arg-type]
        assert (await server.post(input="go on", conversation=made.id))[0] == 200
        assert (await api.update(made.id, metadata={"ü": "☃"})).metadata == {"ü": "☃"}
        found = [item async for item in api.items.list(made.id, limit=2)]
        assert [item.type for item in found] == ["message", "reasoning", *["message"] * 4]
        await api.items.delete(found[0].id, conversation_id=made.id)
        again = await api.items.create(made.id, items=[found[2].to_dict(warnings=False)])  # type: ignore[list-item]
        assert again.data[0].id != found[2].id
        _, body = await server.post(input=[{"type": "item_reference", "id": found[1].id}], store=False)
        assert body["status"] == "completed"
        await api.delete(made.id)
        completions = server.store.completions  # type: ignore[attr-defined]
        whole = {"id": "chatcmpl-" + "0" * 32, "created": 1, "model": "m", "metadata": {}}
        await completions.put(StoredCompletion(whole, []), b"")
        await completions.update(whole["id"], b"", {"k": "v"})
        (listed,), more = await completions.page(b"", Page(), {"k": "v"})
        assert (listed["id"], more) == (whole["id"], False)
        await completions.delete(whole["id"], b"")
        stats = await server.store.stats()
        assert (stats.num_responses, stats.num_conversations) == (1, 0)


def test_the_error_for_an_unreachable_server_omits_the_password(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError, match="cannot open") as caught:
        opened(f"postgresql://me:hunter2@/nothing?host={tmp_path}")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@[::1/db",
        "postgresql://me:hunter2%zz@host/db",
        "postgresql://me:hunter2/x@host/db",
        "postgresql://me:p@hunter2@nosuchhost.invalid/db",
    ],
)
def test_the_error_for_a_malformed_url_omits_the_password(url: str) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(ConfigError) as caught:
        check_store(url)
    assert "hunter2" not in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_newer_tables_are_refused(database: str) -> None:
    import psycopg

    asyncio.run(opened(database).close())
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute("UPDATE chorale.schema_version SET version = 99")
    with pytest.raises(ConfigError, match="format 99"):
        opened(database)


def test_psycopg_is_needed_only_for_a_postgresql_url() -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from chorale.store.store import open_store\n"
        "from chorale.config.engine import ServerConfig\n"
        "open_store(ServerConfig(response_store=':memory:'))\n"
        "try: open_store(ServerConfig(response_store='postgresql:///x'))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ConfigError")
    assert ".[postgres]" in done.stdout
