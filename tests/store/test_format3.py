"""Stores that the version before wrote (format 3, rendered events) are read and carried on by this one.

``data/make_format3.py.txt`` made the data by that version's HTTP API, and records what it answered.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chorale.api.responses.background.recovery import recovery
from chorale.api.responses.background.resume import Resumer
from chorale.config import ServerConfig
from chorale.store.protocol import RESTARTED
from chorale.store.schema import VERSION
from chorale.store.store import ResponseStore, open_store
from chorale.testing.scripted_client import Script
from tests.api.responses.background.test_background import ended, resume
from tests.support.responses import HELLO, VOCAB, Server, fold_events, serve, tokens
from tests.support.server import run
from tests.support.sse import parse_sse

DATA = Path(__file__).parent / "data"
LOST = ("acted", "half_call", "seen")  # in progress when the server was killed, and not to be resumed
RESUMED = ("waiting", "queued", "unread", "in_conversation")


def unpacked(name: str) -> bytes:
    return gzip.decompress((DATA / name).read_bytes())


@pytest.fixture(params=["db", "sql"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """(place of the store, what the old version answered)"""
    answers = json.loads(unpacked(f"format3.{request.param}.json.gz"))
    if request.param == "sql":
        url: str = request.getfixturevalue("database")
        load(url, unpacked("format3.sql.gz").decode())
        return url, answers
    place = tmp_path / "responses.sqlite3"
    place.write_bytes(unpacked("format3.db.gz"))
    return str(place), answers


def load(url: str, dump: str) -> None:
    """The statements of a dump; lines that begin with a backslash are for psql."""
    import psycopg

    statements = "\n".join(line for line in dump.splitlines() if not line.startswith("\\"))
    with psycopg.connect(url) as connection:
        connection.execute("DROP SCHEMA IF EXISTS chorale CASCADE")
        connection.execute(statements)


def opened(place: str) -> ResponseStore:
    return open_store(ServerConfig(response_store=place, response_store_ttl=1e12), recovery(VOCAB))


@asynccontextmanager
async def served(place: str, *scripts: str | Script) -> AsyncIterator[Server]:
    """A server that expires and resumes what dead servers left, as a real one does."""
    store = opened(place)
    async with serve(*(scripts or (HELLO,)), store=store) as server:
        state = server.app.state
        state.background._beat_seconds, state.background._patience = 0.02, 3
        watch = asyncio.create_task(state.background.watch(store, Resumer(state)))
        try:
            yield server
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


async def text(server: Server, path: str, **headers: str) -> str:
    answer = await server.http.get(path, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_what_has_ended_is_answered_as_before(old: tuple[str, dict[str, Any]]) -> None:
    place, answers = old
    ended_before = {k: v for k, v in answers["responses"].items() if k not in (*LOST, *RESUMED)}
    ended_before = {k: v for k, v in ended_before.items() if not k.endswith("_restarted")}
    assert len(ended_before) >= 16

    async def scenario() -> None:
        async with served(place) as server:
            for name, known in ended_before.items():
                path = f"/v1/responses/{known['id']}"
                assert json.loads(await text(server, path)) == known["body"], name
                assert json.loads(await text(server, f"{path}/input_items")) == known["input_items"]
                if "events" not in known:
                    continue
                whole = await text(server, f"{path}?stream=true")
                if name == "summary":  # a key of its events stands elsewhere
                    assert parse_sse(whole.encode()) == parse_sse(known["events"].encode())
                    continue
                assert whole == known["events"], name
                events = parse_sse(known["events"].encode())
                later = await text(server, f"{path}?stream=true&starting_after=3")
                assert later == "\n\n".join(known["events"].split("\n\n")[4:]), name
                hidden = await text(server, f"{path}?stream=true&include_obfuscation=true")
                found = parse_sse(hidden.encode())
                plain = [{k: v for k, v in event.items() if k != "obfuscation"} for event in found]
                assert plain == events
            for name in ("logprobs", "failed"):
                for dialect in ("open-responses", "summary"):
                    path = f"/v1/responses/{answers['responses'][name]['id']}?stream=true"
                    translated = await text(server, path, **{"x-responses-dialect": dialect})
                    known_events = parse_sse(answers["responses"][name][f"events_{dialect}"].encode())
                    assert parse_sse(translated.encode()) == known_events

    run(scenario)


def test_conversations_and_chat_completions_are_there(old: tuple[str, dict[str, Any]]) -> None:
    place, answers = old

    async def scenario() -> None:
        async with served(place) as server:
            for conversation_id, known in answers["conversations"].items():
                path = f"/v1/conversations/{conversation_id}"
                assert json.loads(await text(server, path)) == known["object"]
                assert json.loads(await text(server, f"{path}/items?order=asc")) == known["items"]
            for completion_id, known in answers["completions"].items():
                found = await server.store.completions.get(completion_id, b"")
                assert found is not None
                assert found.completion == known["object"]
            chained = answers["responses"]["chained"]["id"]
            status, body = await server.post(input="go on", previous_response_id=chained)
            assert (status, body["status"]) == (200, "completed")

    run(scenario)


def test_what_the_dead_server_began_is_resumed_or_fails(old: tuple[str, dict[str, Any]]) -> None:
    """Nothing is lost or hangs; what fails has the output that the old version would have given it."""
    place, answers = old

    async def scenario() -> None:
        async with served(place) as server:
            for name in RESUMED:
                made = answers["responses"][name]["id"]
                body = await ended(server, made)
                assert body["status"] == "completed", name
                assert body["output"][-1]["content"][0]["text"] == "Hi there!"
                events = await resume(server, made)
                assert fold_events(events) == body
                assert [event["type"] for event in events[:2]] == ["response.created", "response.queued"]
            listed = json.loads(await text(server, f"/v1/conversations/{answers['held']}/items?order=asc"))
            assert [item["type"] for item in listed["data"]] == ["message", "reasoning", "message"]
            for name in LOST:
                known = answers["responses"][name]
                body = await ended(server, known["id"])
                assert (body["status"], body["error"]) == ("failed", RESTARTED)
                events = await resume(server, known["id"])
                if restarted := answers["responses"].get(f"{name}_restarted"):
                    assert body == restarted["body"]
                    assert events == parse_sse(restarted["events"].encode())
                assert fold_events(events) == body
        stats = opened(place)
        assert (await stats.stats()).num_live == 0
        for known in answers["responses"].values():
            await stats.delete(known["id"], b"")
        for conversation_id in (*answers["conversations"], answers["held"]):
            await stats.conversations.delete(conversation_id, b"")
        for completion_id in answers["completions"]:
            await stats.completions.delete(completion_id, b"")
        left = await stats.stats()
        assert (left.num_responses, left.num_bytes, left.num_conversations) == (0, 0, 0)
        await stats.close()

    run(scenario)


def test_a_resumed_response_goes_on_being_resumable(old: tuple[str, dict[str, Any]]) -> None:
    place, answers = old

    async def scenario() -> None:
        hangs = Script(tokens(HELLO)[:8], hang=True)
        async with served(place, hangs) as server:
            made = answers["responses"]["unread"]["id"]
            while (await server.store.get(made, b"")).status != "in_progress":  # type: ignore[union-attr]
                await asyncio.sleep(0.02)
            await server.app.state.background.put_back(server.store)
        async with served(place) as server:
            assert (await ended(server, made))["status"] == "completed"

    run(scenario)


def test_the_tables_of_an_upgraded_store_are_those_of_a_new_one(tmp_path: Path) -> None:
    import sqlite3

    def tables(path: Path) -> Any:
        connection = sqlite3.connect(path)
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master ORDER BY name")]
        columns = {
            name: sorted(r[1:4] for r in connection.execute(f"PRAGMA table_info({name})")) for name in names
        }
        version = connection.execute("SELECT version FROM schema_version").fetchall()
        connection.close()
        return columns, version

    upgraded, new = tmp_path / "a.sqlite3", tmp_path / "b.sqlite3"
    upgraded.write_bytes(unpacked("format3.db.gz"))
    for path in (upgraded, new):
        asyncio.run(opened(str(path)).close())
    assert tables(upgraded) == tables(new)
    assert tables(new)[1] == [(VERSION,)]
