"""The response store: acknowledged writes are durable, bounds are kept, branches share their history."""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chorale.api.responses.background.recovery import recovery
from chorale.config.engine import ServerConfig
from chorale.errors import ConfigError, ContextLengthError
from chorale.ids import new_id
from chorale.store import responses
from chorale.store.access import EVICT_ROWS
from chorale.store.database.schema import VERSION
from chorale.store.database.sql import Database
from chorale.store.protocol import PreviousResponseNotFoundError, StoredItem, StoredResponse, StoreError
from chorale.store.store import ResponseStore, SqliteStore, open_store
from tests.support.responses import VOCAB

Test = Callable[[], Coroutine[Any, Any, None]]


def make(
    previous: str | None = None, *, owner: bytes = b"", text: str = "hello", created: float = 1.0
) -> StoredResponse:
    response_id = new_id("resp")
    return StoredResponse(
        id=response_id,
        owner=owner,
        previous_id=previous,
        created=created,
        status="completed",
        body={"id": response_id, "object": "response", "output": [], "huge": 10**40, "metadata": {"ü": "☃"}},
        input=(StoredItem({"type": "message", "role": "user", "content": text}),),
        output=(
            StoredItem({"id": new_id("msg"), "type": "message", "text": text}, (200005, 17196, 200008, 0)),
        ),
    )


async def kept(store: ResponseStore, response_id: str) -> StoredResponse:
    found = await store.get(response_id, b"")
    assert found is not None
    return found


def items_of(*responses: StoredResponse) -> list[StoredItem]:
    return [stored for response in responses for stored in (*response.input, *response.output)]


@pytest.fixture(params=["file", "memory", "postgres"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        url: str = request.getfixturevalue("database")
        return url
    return ":memory:" if request.param == "memory" else str(tmp_path / "deep" / "responses.sqlite3")


def opened(path: str) -> ResponseStore:
    return open_store(ServerConfig(response_store=path), recovery(VOCAB))


async def test_round_trip(path: str) -> None:
    store = opened(path)
    response = make()
    await store.put(response)
    assert await store.get(response.id, b"") == response
    assert response.to_object()["output"] == [response.output[0].item]
    assert await store.get(new_id("resp"), b"") is None
    stats = await store.stats()
    assert stats.num_responses == 1
    assert stats.num_bytes > 0
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.get(response.id, b"")


@pytest.mark.parametrize(
    "bad", ["", "resp_", "resp_" + "0" * 31, "resp_" + "G" * 32, "x' OR 1=1 --", "resp_" + "0" * 32 + "\n"]
)
async def test_malformed_ids_are_not_looked_up(bad: str) -> None:
    store = SqliteStore()
    assert await store.get(bad, b"") is None
    assert not await store.delete(bad, b"")
    with pytest.raises(PreviousResponseNotFoundError):
        await store.chain(bad, b"")
    await store.close()


async def test_owners_do_not_see_each_other(path: str) -> None:
    store = opened(path)
    mine = make(owner=b"me")
    await store.put(mine)
    item_id = mine.output[0].item["id"]
    assert await store.get(mine.id, b"you") is None
    assert await store.items([item_id], b"you") == {}
    assert not await store.delete(mine.id, b"you")
    with pytest.raises(PreviousResponseNotFoundError):
        await store.chain(mine.id, b"you")
    assert await store.items([item_id, item_id, "rubbish"], b"me") == {item_id: mine.output[0]}
    assert await store.get(mine.id, b"me") == mine
    await store.close()


@pytest.mark.parametrize("tokens_first", [True, False])
async def test_an_item_with_the_models_tokens_is_preferred(path: str, tokens_first: bool) -> None:
    """A client may send an output back as input, but only the original can be replayed exactly."""
    store = opened(path)
    written = make()
    (output,) = written.output
    sent = replace(make(), input=(StoredItem(output.item),), output=())
    for response in (written, sent) if tokens_first else (sent, written):
        await store.put(response)
    item_id = output.item["id"]
    assert await store.items([item_id], b"") == {item_id: output}
    await store.close()


async def test_branches_share_their_history_and_stay_independent(path: str) -> None:
    store = opened(path)
    root = make(text="root")
    await store.put(root)
    left, right = make(root.id, text="left"), make(root.id, text="right")
    await asyncio.gather(store.put(left), store.put(right))
    deeper = make(left.id, text="deeper")
    await store.put(deeper)
    assert await store.chain(deeper.id, b"") == items_of(root, left, deeper)
    assert await store.chain(right.id, b"") == items_of(root, right)
    assert await store.delete(right.id, b"")
    assert not await store.delete(right.id, b"")
    assert await store.chain(deeper.id, b"") == items_of(root, left, deeper)
    await store.delete(root.id, b"")
    with pytest.raises(PreviousResponseNotFoundError, match=root.id) as caught:
        await store.chain(deeper.id, b"")
    assert caught.value.param == "previous_response_id"
    assert caught.value.code == "previous_response_not_found"
    assert await store.get(deeper.id, b"") == deeper
    await store.close()


async def test_a_chain_larger_than_any_context_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_CHAIN_BYTES", 40_000)

    store = SqliteStore()
    tip: StoredResponse | None = None
    for number in range(4):
        tip = make(tip.id if tip is not None else None, text="x" * 10_000)
        await store.put(tip)
        if number == 0:
            assert await store.chain(tip.id, b"") == items_of(tip)
    with pytest.raises(ContextLengthError):
        await store.chain(tip.id, b"")
    await store.close()


async def test_the_count_is_bounded_and_used_chains_stay() -> None:
    now = [0.0]
    store = SqliteStore(config=ServerConfig(response_store_max_items=10), clock=lambda: now[0])
    tip = root = make()
    await store.put(root)
    for _ in range(50):
        now[0] += 100.0
        await store.put(make())
        child = make(tip.id)
        if len(await store.chain(tip.id, b"")) < 4 * 2:
            await store.put(child)
            tip = child
        else:
            await store.put(make(tip.id))  # a new branch each time keeps the chain in use
        assert (await store.stats()).num_responses <= 10
    assert (await store.chain(tip.id, b""))[:2] == items_of(root)
    await store.close()


async def test_each_write_evicts_a_few_rows_beyond_the_byte_bound(tmp_path: Path) -> None:
    file = tmp_path / "r.sqlite3"
    store = SqliteStore(str(file))
    for _ in range(100):
        await store.put(make(text="x" * 10_000))
    await store.close()
    store = SqliteStore(
        str(file), ServerConfig(response_store_max_bytes=200_000)
    )  # the operator lowered the bound
    sizes = []
    for _ in range(40):
        await store.put(make(text="x" * 10_000))
        sizes.append((await store.stats()).num_responses)
    assert sizes[0] == 100 + 1 - EVICT_ROWS
    assert sizes[-1] < 12
    assert (await store.stats()).num_bytes <= 200_000
    await store.close()


async def test_expired_responses_are_evicted_while_idle() -> None:
    now = [1000.0]
    store = SqliteStore(config=ServerConfig(response_store_ttl=50.0), clock=lambda: now[0], idle_seconds=0.02)
    old = make()
    await store.put(old)
    now[0] += 51.0
    assert await store.get(old.id, b"") is None  # hidden before it is evicted
    for _ in range(100):
        if (await store.stats()).num_responses == 0:
            break
        await asyncio.sleep(0.02)
    assert (await store.stats()).num_responses == 0
    await store.close()


def _num_pages(db: Database) -> int:
    return int(db.execute("PRAGMA page_count").fetchone()[0])


async def test_an_idle_store_evicts_down_to_its_bound_and_releases_space(tmp_path: Path) -> None:
    file = tmp_path / "r.sqlite3"
    store = SqliteStore(str(file))
    await asyncio.gather(*(store.put(make(text="x" * 3000)) for _ in range(1500)))
    await store.close()
    num_pages = file.stat().st_size // 4096
    pauses: list[float] = []
    store = SqliteStore(str(file), ServerConfig(response_store_max_items=10), idle_seconds=0.01)
    store._access.writer._idle_seconds = 1e9  # no idle run but the first and its repetitions
    tidy = store._access.tidy
    store._access.writer._idle = lambda db: pauses.append(time.thread_time()) or tidy(db)
    async with asyncio.timeout(60):
        while (await store.stats()).num_responses > 10:
            await asyncio.sleep(0.05)
        while await store._access.read(_num_pages) > num_pages / 8:
            await asyncio.sleep(0.05)
    assert max(after - before for before, after in itertools.pairwise(pauses)) < 0.05
    await store.close()


async def test_a_file_can_be_reopened_and_shared_by_two_stores(tmp_path: Path) -> None:
    file = str(tmp_path / "r.sqlite3")
    first, second = SqliteStore(file), SqliteStore(file)
    a, b = make(), make()
    await asyncio.gather(first.put(a), second.put(b))
    assert await first.get(b.id, b"") == b
    assert await second.get(a.id, b"") == a
    await first.close()
    await second.close()
    again = SqliteStore(file)
    assert await again.get(a.id, b"") == a
    await again.close()
    assert (Path(file).stat().st_mode & 0o777) == 0o600


async def test_one_faulty_put_does_not_fail_others(path: str) -> None:
    store = opened(path)
    good, twice = make(), make()
    await store.put(twice)
    results = await asyncio.gather(
        store.put(twice), store.put(good), return_exceptions=True
    )  # the id exists already
    assert isinstance(results[0], StoreError)
    assert results[1] is None
    assert await store.get(good.id, b"") == good
    await store.close()


@pytest.mark.parametrize("damage", ["header", "middle"])
async def test_a_damaged_file_is_moved_aside(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "r.sqlite3"

    async def fill() -> None:
        store = SqliteStore(str(file))
        for _ in range(50):
            await store.put(make(text="x" * 3000))
        await store.close()

    async def use() -> None:
        store = SqliteStore(str(file))
        response = make()
        await store.put(response)
        assert (await store.stats()).num_responses == 1
        await store.close()

    await fill()
    content = bytearray(file.read_bytes())
    start = 0 if damage == "header" else len(content) // 2
    content[start : start + 8192] = random.Random(1).randbytes(8192)
    file.write_bytes(content)
    await use()
    assert len(list(tmp_path.glob("r.sqlite3.corrupt-*"))) == 1
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("found", [VERSION - 1, VERSION + 1])
def test_a_file_of_another_format_is_refused_not_destroyed(found: int, tmp_path: Path) -> None:
    file = tmp_path / "r.sqlite3"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE schema_version (version INTEGER NOT NULL)")
    connection.execute("INSERT INTO schema_version VALUES (?)", (found,))
    connection.commit()
    connection.close()
    with pytest.raises(ConfigError, match="format"):
        SqliteStore(str(file))
    assert list(tmp_path.glob("*.corrupt-*")) == []


async def test_open_store_uses_the_configured_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def roundtrip(config: ServerConfig) -> None:
        store = open_store(config)
        response = make()
        await store.put(response)
        assert await store.get(response.id, b"") == response
        await store.close()

    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    await roundtrip(ServerConfig())
    assert (tmp_path / "state" / "chorale" / "responses.sqlite3").exists()
    await roundtrip(ServerConfig(response_store=":memory:"))
    with pytest.raises(StoreError):
        open_store(ServerConfig(response_store=str(blocked / "r.sqlite3")))
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    await roundtrip(ServerConfig())
    assert "memory only" in caplog.text


@pytest.mark.parametrize(
    ("bound", "least"),
    [
        ({"response_store_max_items": 5}, 2),
        ({"response_store_max_bytes": 30_000}, 2),
        ({"response_store_ttl": -1.0}, 0),
    ],
)
async def test_open_store_uses_the_configured_bounds(bound: dict[str, float], least: int) -> None:
    store = open_store(ServerConfig(response_store=":memory:", **bound))
    made = [make(text="x" * 1000, created=time.time()) for _ in range(16)]
    for response in made:
        await store.put(response)
    found = [await store.get(response.id, b"") is not None for response in made]
    assert least <= sum(found) <= 9
    assert found == sorted(found), "the newest are left"
    await store.close()


def test_killed_writers_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Kills the writing process at a random moment, five times with one file."""
    file, rng, acknowledged = tmp_path / "r.sqlite3", random.Random(7), set[str]()
    script = "tests.support.store.store_writer"
    for run in range(5):
        with subprocess.Popen(
            [sys.executable, "-m", script, str(file), str(run)], stdout=subprocess.PIPE, text=True
        ) as child:
            acknowledged.add(child.stdout.readline().strip())
            time.sleep(rng.uniform(0.0, 0.2))
            child.kill()
            # Ignores a line that the kill has truncated.
            acknowledged.update(line.strip() for line in child.stdout if line.endswith("\n"))

    async def check() -> None:
        store = SqliteStore(str(file))
        for response_id in acknowledged:
            found = await kept(store, response_id)
            assert found.output[0] == StoredItem({"type": "message", "content": response_id}, (1, 2, 3))
        assert (await store.stats()).num_responses >= len(acknowledged)
        await store.close()

    asyncio.run(check())
    assert len(acknowledged) > 100
    assert list(tmp_path.glob("*.corrupt-*")) == []
