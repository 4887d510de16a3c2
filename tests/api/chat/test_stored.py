"""Stored chat completions: stored on request, streamed or not, and used through the unmodified SDK."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from chorale.errors import EngineDeadError
from tests.support.scripted import ANALYSIS, FINAL, NEXT, events_of, playing
from tests.support.server import served

ANSWER = ANALYSIS + "T." + NEXT + FINAL + "Hello.<|return|>"
PATH = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stored_completion_equals_the_sent_one(stream: bool) -> None:
    async with served(playing(ANSWER)) as server:
        response = await server.chat(store=True, metadata={"a": "b"}, stream=stream, n=2, temperature=0.5)
        sent = events_of(response)[0] if stream else response.json()
        kept = (await server.http.get(f"{PATH}/{sent['id']}")).json()
        assert [c["message"]["content"] for c in kept["choices"]] == ["Hello.", "Hello."]
        assert (kept["metadata"], kept["temperature"], kept["object"]) == ({"a": "b"}, 0.5, "chat.completion")
        if not stream:
            assert {key: kept[key] for key in sent} == sent
        assert (await server.http.get(f"/v1/responses/{sent['id']}")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_stored_without_store(stream: bool) -> None:
    async with served(playing(ANSWER)) as server:
        response = await server.chat(stream=stream)
        sent = events_of(response)[0] if stream else response.json()
        missing = await server.http.get(f"{PATH}/{sent['id']}")
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "completion_id")
        assert (await server.http.get(PATH)).json()["data"] == []


async def test_a_failed_stream_is_not_stored() -> None:
    async with served(playing(FINAL + "x", error=EngineDeadError("gone"))) as server:
        events_of(await server.chat(store=True, stream=True))
        assert (await server.http.get(PATH)).json()["data"] == []


async def test_the_sdk_reads_lists_changes_and_deletes() -> None:
    async with served(playing(ANSWER)) as server:
        chat = server.sdk.chat.completions
        parts: Any = [{"type": "text", "text": "two"}]
        messages: Any = [{"role": "system", "content": "one"}, {"role": "user", "content": parts}]
        made = [
            await chat.create(model="demo", messages=messages, store=True, metadata={"n": str(number)})
            for number in range(5)
        ]
        found = await chat.retrieve(made[0].id)
        assert found.choices[0].message.content == "Hello."
        listed = [entry.id async for entry in chat.list(limit=2)]
        assert listed == [entry.id for entry in made]
        newest = await chat.list(order="desc", limit=1)
        assert [entry.id for entry in newest.data] == [made[-1].id]
        assert newest.has_next_page()
        chosen = await chat.list(metadata={"n": "3"}, model="demo")
        assert [entry.id for entry in chosen.data] == [made[3].id]
        assert (await chat.list(model="other")).data == []
        asked = await chat.messages.list(made[0].id)
        assert (asked.data[0].content, asked.data[0].role) == ("one", "system")
        assert asked.data[1].content_parts
        last = await chat.messages.list(made[0].id, order="desc", limit=1)
        assert last.data[0].id == f"{made[0].id}-1"
        changed: Any = await chat.update(made[0].id, metadata={"n": "new"})
        assert changed.metadata == {"n": "new"}
        assert (await chat.list(metadata={"n": "new"})).data[0].id == made[0].id
        assert (await chat.delete(made[0].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await chat.retrieve(made[0].id)
        assert (await server.state.store.stats()).num_responses == 4


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?limit=0", "limit"),
        ("?limit=x", "limit"),
        ("?order=up", "order"),
        ("?after=chatcmpl-x", "after"),
        ("?before=x", "before"),
        ("?metadata=x", "metadata"),
    ],
)
async def test_errors_name_the_query_parameter(query: str, param: str) -> None:
    async with served(playing(ANSWER), unknown_fields="refuse") as server:
        response = await server.http.get(PATH + query)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("way", ["get", "delete", "post", "messages"])
@pytest.mark.parametrize("completion_id", ["chatcmpl-" + "0" * 32, "x", "resp_" + "0" * 32])
async def test_unknown_ids_are_404(way: str, completion_id: str) -> None:
    async with served(playing(ANSWER)) as server:
        path = f"{PATH}/{completion_id}"
        if way == "post":
            response = await server.http.post(path, json={"metadata": {}})
        elif way == "messages":
            response = await server.http.get(f"{path}/messages")
        else:
            response = await server.http.request(way, path)
        assert (response.status_code, response.json()["error"]["param"]) == (404, "completion_id")


@pytest.mark.parametrize("metadata", [None, "x", {"a": 5}, {"k" * 65: "v"}, {str(i): "" for i in range(17)}])
async def test_invalid_metadata_is_refused(metadata: Any) -> None:
    async with served(playing(ANSWER)) as server:
        made = (await server.chat(store=True)).json()
        response = await server.http.post(f"{PATH}/{made['id']}", json={"metadata": metadata})
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("metadata")
