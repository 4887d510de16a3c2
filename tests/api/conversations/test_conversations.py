"""/v1/conversations with the unmodified SDK: the resources, pages, and responses that continue them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from chorale.config.engine import ServerConfig
from chorale.errors import EngineDeadError
from chorale.store.protocol import StoreError
from chorale.store.store import SqliteStore
from tests.support.engine.scripted_client import Script, ids
from tests.support.event_loop import until
from tests.support.responses import ANSWER, CALL, HELLO, MODEL, TOOL, fold_events, serve
from tests.support.server import Server
from tests.support.sse import parse_sse


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


async def texts(server: Server, conversation_id: str) -> list[str]:
    """Returns type and text of every item, oldest first."""
    found = []
    async for item in await server.sdk.conversations.items.list(conversation_id, order="asc"):
        content = getattr(item, "content", None)
        found.append(f"{item.type}:{content[0].text if content else getattr(item, 'output', '')}")
    return found


async def test_conversations_can_be_created_read_updated_and_deleted() -> None:
    async with serve(HELLO) as server:
        api = server.sdk.conversations
        empty = await api.create()
        assert empty.id.startswith("conv_")
        assert empty.metadata == {}
        made = await api.create(metadata={"topic": "tea"}, items=[user("hi"), user("there")])
        assert await api.retrieve(made.id) == made
        changed = await api.update(made.id, metadata={"topic": "coffee"})
        assert (changed.metadata, changed.created_at) == ({"topic": "coffee"}, made.created_at)
        assert await api.retrieve(made.id) == changed
        assert await texts(server, made.id) == ["message:hi", "message:there"]
        gone = await api.delete(made.id)
        assert gone.to_dict() == {"id": made.id, "object": "conversation.deleted", "deleted": True}
        for call in (api.retrieve(made.id), api.delete(made.id), api.update(made.id, metadata={})):
            with pytest.raises(openai.NotFoundError) as caught:
                await call
            assert made.id in caught.value.message
        assert (await server.store.stats()).num_conversations == 1


async def test_items_can_be_added_listed_read_and_deleted() -> None:
    async with serve(HELLO) as server:
        api = server.sdk.conversations
        made = await api.create()
        added = await api.items.create(made.id, items=[user(str(i)) for i in range(5)])
        ids = [item.id for item in added.data]
        assert (added.first_id, added.last_id, added.has_more) == (ids[0], ids[-1], False)
        first = await api.items.list(made.id, limit=2)
        assert [item.id for item in first.data] == [ids[4], ids[3]]
        assert first.has_more
        second = await api.items.list(made.id, limit=2, after=first.last_id)
        assert [item.id for item in second.data] == [ids[2], ids[1]]
        assert [item.id async for item in api.items.list(made.id, limit=2, order="asc")] == ids
        one = await api.items.retrieve(ids[2], conversation_id=made.id)
        assert one.to_dict()["content"] == [{"type": "input_text", "text": "2"}]
        assert (await api.items.delete(ids[2], conversation_id=made.id)).id == made.id
        assert [item.id async for item in api.items.list(made.id, order="asc")] == ids[:2] + ids[3:]
        for call in (
            api.items.retrieve(ids[2], conversation_id=made.id),
            api.items.delete(ids[2], conversation_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                await call
            assert caught.value.code == "item_not_found"
        again = await api.items.create(made.id, items=[one.to_dict(), one.to_dict()])  # type: ignore[list-item]
        assert again.data[0].id == ids[2]
        assert again.data[1].id != ids[2], "an id is unique in its conversation"


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "", {"items": [user("x")] * 21}, "items"),
        ("POST", "", {"items": [{"type": "nonsense"}]}, "items[0].type"),
        ("POST", "", {"metadata": {"k": 1}}, "metadata.k"),
        ("POST", "", {"colour": "red"}, "colour"),
        ("POST", "/items", {"items": []}, "items"),
        ("POST", "/items", {}, "items"),
        ("POST", "/items", {"items": [user("x")], "include": ["all"]}, "include[0]"),
        ("POST", "/items?include=all", {"items": [user("x")]}, "include"),
        ("POST", "/items", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0].id"),
        ("GET", "/items?limit=0", None, "limit"),
        ("GET", "/items?limit=101", None, "limit"),
        ("GET", "/items?order=up", None, "order"),
        ("GET", "/items?after=msg_1", None, "after"),
        ("GET", "/items?page=2", None, "page"),
    ],
)
async def test_errors_name_the_parameter(method: str, path: str, body: Any, param: str) -> None:
    async with serve(HELLO, config=ServerConfig(unknown_fields="refuse")) as server:
        made = await server.sdk.conversations.create()
        where = "" if method == "POST" and not path else f"/{made.id}"
        answer = await server.http.request(method, f"/v1/conversations{where}{path}", json=body)
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["param"] == param


async def test_an_update_without_metadata_is_refused() -> None:
    async with serve(HELLO) as server:
        api = server.sdk.conversations
        made = await api.create(metadata={"topic": "tea"})
        answer = await server.http.post(f"/v1/conversations/{made.id}", json={})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "metadata"
        assert answer.json()["error"]["code"] == "missing_required_parameter"
        assert await api.retrieve(made.id) == made
        assert (await api.update(made.id, metadata=None)).metadata == {}


# --------------------------------------------------------------------------- responses in conversations


@pytest.mark.parametrize("way", ["plain", "stream", "background", "object"])
async def test_a_response_continues_and_extends_its_conversation(way: str) -> None:
    async with serve(HELLO, "<|channel|>final<|message|>Fine.<|return|>") as server:
        made = await server.sdk.conversations.create(items=[user("first")])
        for text in ("hello", "how are you?"):
            body = {"input": text, "conversation": {"id": made.id} if way == "object" else made.id}
            if way == "stream":
                answered = fold_events(await server.events(**body))
            elif way == "background":
                response = (await server.post(**body, background=True))[1]
                answer = await server.http.get(f"/v1/responses/{response['id']}?stream=true")
                answered = fold_events(parse_sse(answer.content.removeprefix(b": waiting\n\n")))
            else:
                answered = (await server.post(**body))[1]
            assert answered["status"] == "completed"
            assert answered["conversation"] == {"id": made.id}
        assert await texts(server, made.id) == [
            "message:first",
            "message:hello",
            "reasoning:Say hi.",
            "message:Hi there!",
            "message:how are you?",
            "message:Fine.",
        ]
        # The second prompt contains the exact tokens of the first answer, without its analysis.
        final = ids("<|start|>assistant<|channel|>final<|message|>Hi there!<|end|>")
        prompt = server.prompt_ids(1)
        assert any(prompt[i : i + len(final)] == final for i in range(len(prompt)))
        assert server.prompt(1).count("hello") == 1


async def test_a_tool_loop_in_a_conversation_replays_exact_tokens() -> None:
    async with serve(CALL, ANSWER) as server:
        made = await server.sdk.conversations.create()
        _, first = await server.post(input="weather?", tools=[TOOL], conversation=made.id)
        call = first["output"][1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"temp":21}'}
        await server.respond(input=[result], tools=[TOOL], conversation=made.id)
        said = [*server.prompt_ids(0), *ids(CALL)]
        assert server.prompt_ids(1)[: len(said)] == said
        assert (await texts(server, made.id))[-1] == "message:21 °C in Paris."


async def test_deleting_a_call_deletes_its_output() -> None:
    """Otherwise every later request on the conversation would fail with 400."""
    async with serve(CALL, HELLO) as server:
        made = await server.sdk.conversations.create()
        create = server.sdk.responses.create
        first = await create(model=MODEL, input="x", conversation=made.id, tools=[TOOL])
        call = first.output[-1]
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 °C"}
        await create(model=MODEL, input=[output], conversation=made.id, tools=[TOOL])
        assert "21 °C" in server.prompt()
        await server.sdk.conversations.items.delete(call.id, conversation_id=made.id)
        left = await server.sdk.conversations.items.list(made.id, limit=100)
        assert not {"function_call", "function_call_output"} & {item.type for item in left.data}
        last = await create(model=MODEL, input="go on", conversation=made.id, tools=[TOOL])
        assert last.status == "completed"
        assert "21 °C" not in server.prompt()


async def test_responses_are_400_while_an_output_has_no_call() -> None:
    async with serve(HELLO) as server:
        alone = {"type": "function_call_output", "call_id": "call_zzz", "output": "21 °C"}
        made = await server.sdk.conversations.create(items=[alone])  # type: ignore[list-item]
        status, body = await server.post(input="go on", conversation=made.id)
        assert (status, body["error"]["param"]) == (400, "input")
        items = await server.sdk.conversations.items.list(made.id)
        await server.sdk.conversations.items.delete(items.data[0].id or "", conversation_id=made.id)
        assert (await server.post(input="go on", conversation=made.id))[0] == 200


async def test_failed_and_cancelled_responses_add_no_items_and_unlock() -> None:
    dead = Script(ids(HELLO)[:8], error=EngineDeadError("gone"))
    async with serve(dead, dead, Script(ids(HELLO)[:8], hang=True), HELLO) as server:
        made = await server.sdk.conversations.create()
        assert (await server.post(input="a", conversation=made.id))[0] == 503
        assert (await server.events(input="b", conversation=made.id))[-1]["type"] == "response.failed"
        _, running = await server.post(input="c", conversation=made.id, background=True)
        cancelled = await server.sdk.responses.cancel(running["id"])
        assert cancelled.status == "cancelled"
        assert await texts(server, made.id) == []
        bad = await server.post(input=[{"type": "nonsense"}], conversation=made.id)
        assert bad[0] == 400
        assert (await server.post(input="d", conversation=made.id))[0] == 200
        assert len(await texts(server, made.id)) == 3


async def test_the_items_of_a_truncated_response_are_kept() -> None:
    async with serve(Script(ids(HELLO)[:12])) as server:
        made = await server.sdk.conversations.create()
        _, body = await server.post(input="a", conversation=made.id)
        assert body["status"] == "incomplete"
        assert len(await texts(server, made.id)) == 1 + len(body["output"])


async def test_a_conversation_in_use_is_locked() -> None:
    async with serve(Script(ids(HELLO), delay=0.02), HELLO) as server:
        api = server.sdk.conversations
        made = await api.create(items=[user("first")])
        (item,) = (await api.items.list(made.id)).data
        running = asyncio.create_task(server.post(input="a", conversation=made.id))
        await until(lambda: server.client.requests)
        status, body = await server.post(input="b", conversation=made.id)
        assert (status, body["error"]["code"]) == (400, "conversation_locked")
        assert body["error"]["param"] == "conversation"
        for call in (
            api.items.create(made.id, items=[user("x")]),
            api.items.delete(item.id, conversation_id=made.id),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await call
            assert caught.value.code == "conversation_locked"
        assert (await running)[0] == 200
        assert (await server.post(input="b", conversation=made.id))[0] == 200
        assert [text.partition(":")[2] for text in await texts(server, made.id)] == [
            "first", "a", "Say hi.", "Hi there!", "b", "Say hi.", "Hi there!",
        ]  # fmt: skip


async def test_concurrent_responses_never_interleave() -> None:
    async with serve(Script(ids(HELLO), delay=0.001)) as server:
        made = await server.sdk.conversations.create()

        async def insist(text: str) -> None:
            while (await server.post(input=text, conversation=made.id))[0] != 200:
                await asyncio.sleep(0.01)

        await asyncio.gather(*(insist(str(i)) for i in range(8)))
        found = await texts(server, made.id)
        assert [text.split(":")[0] for text in found] == ["message", "reasoning", "message"] * 8
        assert sorted(found[::3]) == [f"message:{i}" for i in range(8)]


async def test_a_disconnect_unlocks_the_conversation() -> None:
    async with serve(Script(ids(HELLO)[:8], hang=True), HELLO) as server:
        made = await server.sdk.conversations.create()
        task = asyncio.create_task(server.post(input="a", conversation=made.id))
        await until(lambda: server.client.requests)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert (await server.post(input="b", conversation=made.id))[0] == 200


async def test_a_response_with_store_false_extends_the_conversation() -> None:
    async with serve(HELLO) as server:
        made = await server.sdk.conversations.create()
        _, body = await server.post(input="a", conversation=made.id, store=False)
        assert (await server.http.get(f"/v1/responses/{body['id']}")).status_code == 404
        assert len(await texts(server, made.id)) == 3


async def test_a_response_of_a_conversation_can_be_continued_by_its_id() -> None:
    """The continuation sees the items up to that response, and none added later."""
    async with serve(HELLO) as server:
        made = await server.sdk.conversations.create(items=[user("beginning")])
        _, first = await server.post(input="one", conversation=made.id)
        await server.post(input="two", conversation=made.id)
        await server.post(input="branch", previous_response_id=first["id"])
        text = server.prompt()
        assert [word in text for word in ("beginning", "one", "two", "branch")] == [True, True, False, True]
        status, body = await server.post(input="x", previous_response_id=first["id"], conversation=made.id)
        assert (status, body["error"]["code"]) == (400, "mutually_exclusive_parameters")


async def test_counting_prompt_tokens_does_not_lock_the_conversation() -> None:
    async with serve(HELLO) as server:
        made = await server.sdk.conversations.create(items=[user("some words")])
        counted = await server.sdk.responses.input_tokens.count(
            model=MODEL, input="more", conversation=made.id
        )
        await server.post(input="more", conversation=made.id)
        assert counted.input_tokens == len(server.prompt_ids())


async def test_deleting_a_conversation_does_not_fail_its_running_response() -> None:
    async with serve(Script(ids(HELLO), delay=0.02)) as server:
        made = await server.sdk.conversations.create()
        running = asyncio.create_task(server.post(input="a", conversation=made.id))
        await until(lambda: server.client.requests)
        await server.sdk.conversations.delete(made.id)
        status, body = await running
        assert status == 200
        assert (await server.http.get(f"/v1/responses/{body['id']}")).status_code == 200


class _FullStore(SqliteStore):
    async def put(self, *args: Any) -> None:
        raise StoreError("the disk is full")


async def test_a_store_failure_fails_a_response_in_a_conversation() -> None:
    """Otherwise the next turn would miss this one. Without a conversation the request succeeds."""
    async with serve(HELLO, store=_FullStore()) as server:
        made = await server.sdk.conversations.create()
        status, body = await server.post(input="a", conversation=made.id)
        assert (status, body["error"]["code"]) == (503, "store_unavailable")
        events = await server.events(input="a", conversation=made.id)
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert (await server.post(input="a"))[1]["store"] is False
