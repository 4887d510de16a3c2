"""Compaction within a response: ``context_management`` and ``compaction_trigger``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chorale.api.responses.items.encrypted_content import pack, seal, unpack, unseal
from chorale.errors import EngineError
from tests.support.engine.scripted_client import Script, ids
from tests.support.event_loop import until
from tests.support.responses import ANSWER, CALL, HELLO, TOOL, fold_events, serve, without_ids

THINK = "<|channel|>analysis<|message|>What happened?<|end|><|start|>assistant"
SUMMARY = THINK + "<|channel|>final<|message|>They said hi.<|return|>"
AGAIN = "<|channel|>final<|message|>More happened.<|return|>"
TOLD = "Summary of the conversation before this:\n\nThey said hi."


def at(threshold: int | None) -> dict[str, Any]:
    return {"context_management": [{"type": "compaction", "compact_threshold": threshold}]}


def kinds(body: dict[str, Any]) -> list[str]:
    return [item["type"] for item in body["output"]]


def unsealed(item: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    assert set(item) == {"id", "type", "encrypted_content"}
    return unpack(unseal(item["encrypted_content"], "x") or "")


async def test_a_long_conversation_is_summarized_before_the_answer() -> None:
    async with serve(HELLO, SUMMARY, HELLO, HELLO) as server:
        _, first = await server.post(input="an old story", instructions="Be kind.")
        events = await server.events(
            input="and now?", instructions="Be kind.", previous_response_id=first["id"], **at(50)
        )
        body = fold_events(events)
        assert (body["status"], kinds(body)) == ("completed", ["compaction", "reasoning", "message"])
        told = [event["type"] for event in events if event.get("output_index") == 0]
        assert told == [
            "response.output_item.added",
            "response.compaction.compacting",
            "response.output_item.done",
        ]
        assert unsealed(body["output"][0]) == ("They said hi.", ("and now?",))

        asked = server.prompt(1)
        assert asked.index("Hi there!") < asked.index("and now?") < asked.index("Summarize this")
        answered = server.prompt(2)
        assert "an old story" not in answered
        assert "Be kind." in answered
        assert answered.endswith(f"{TOLD}<|end|><|start|>user<|message|>and now?<|end|><|start|>assistant")
        usage = body["usage"]
        assert usage["input_tokens"] == len(server.prompt_ids(1)) + len(server.prompt_ids(2))
        assert usage["output_tokens"] == len(ids(SUMMARY)) + len(ids(HELLO))

        # Items before the compaction are never rendered again; those after it are replayed exactly.
        await server.post(
            input="go on",
            instructions="Be kind.",
            previous_response_id=body["id"],
            reasoning={"context": "all_turns"},
        )
        assert server.prompt_ids()[: len(server.prompt_ids(2))] == server.prompt_ids(2)
        assert server.prompt().count("They said hi.") == 1
        assert "an old story" not in server.prompt()


@pytest.mark.parametrize("pruned", [False, True])
async def test_stateless_clients_may_drop_the_items_before_the_compaction(pruned: bool) -> None:
    async with serve(SUMMARY, HELLO) as server:
        history = [
            {"role": "user", "content": "an old story"},
            {"role": "assistant", "content": "Nice."},
            {"role": "user", "content": "and now?"},
        ]
        _, body = await server.post(input=history, store=False, **at(50))
        assert kinds(body) == ["compaction", "reasoning", "message"]
        following = [*([] if pruned else history), *body["output"], {"role": "user", "content": "go on"}]
        await server.post(input=following, store=False)
        text = server.prompt()
        assert "an old story" not in text
        order = [text.index(part) for part in (TOLD, "and now?", "Hi there!", "go on")]
        assert order == sorted(order)


async def test_body_stream_background_and_conversation_have_equal_output() -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ask = {"input": [*history, {"role": "user", "content": "c"}], **at(50)}
    bodies = []
    async with serve(SUMMARY, HELLO) as server:
        bodies.append((await server.post(**ask))[1])
    async with serve(SUMMARY, HELLO) as server:
        bodies.append(fold_events(await server.events(**ask)))
        stored = (await server.http.get(f"/v1/responses/{bodies[-1]['id']}")).json()
        assert stored == bodies[-1]
    async with serve(SUMMARY, HELLO) as server:
        bodies.append(fold_events(await server.events(**ask, background=True)) | {"background": False})
    async with serve(SUMMARY, HELLO, AGAIN) as server:
        conversation = await server.sdk.conversations.create()
        bodies.append((await server.post(**ask, conversation=conversation.id))[1] | {"conversation": None})
        items = await server.sdk.conversations.items.list(conversation.id, order="asc")
        assert [item.type for item in items.data][-3:] == ["compaction", "reasoning", "message"]
        await server.post(input="d", conversation=conversation.id)
        assert TOLD in server.prompt()
    first, *others = [without_ids(body) for body in bodies]
    assert all(other == first for other in others)


async def test_short_conversations_and_single_messages_are_not_compacted() -> None:
    async with serve(HELLO) as server:
        _, first = await server.post(input="hi", **at(100_000))
        assert kinds(first) == ["reasoning", "message"]
        _, second = await server.post(input="word " * 2000, **at(100))
        assert kinds(second) == ["reasoning", "message"], "there is nothing before a single message"
        _, third = await server.post(input="hi", context_management=[])
        assert kinds(third) == ["reasoning", "message"]


async def test_compaction_accepts_more_than_the_context_window() -> None:
    history: list[dict[str, Any]] = []
    for number in range(20):
        history += [
            {"role": "user", "content": f"{number} " + "word " * 300},
            {"role": "assistant", "content": "ok"},
        ]
    ask = [*history, {"role": "user", "content": "and now?"}]
    async with serve(SUMMARY, HELLO, max_model_len=2000) as server:
        status, body = await server.post(input=ask)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        status, body = await server.post(input=ask, **at(None))
        assert (status, kinds(body)) == (200, ["compaction", "reasoning", "message"])
        assert len(server.prompt_ids(0)) < 2000
        assert server.prompt(1).endswith("and now?<|end|><|start|>assistant")


async def test_an_unanswered_question_is_kept_verbatim_by_every_compaction() -> None:
    async with serve(CALL, SUMMARY, CALL, AGAIN, ANSWER) as server:
        ask: dict[str, Any] = {"tools": [TOOL], **at(100)}
        _, body = await server.post(input="the weather in Paris, word for word", **ask)
        for number in range(2):
            call = next(item for item in body["output"] if item["type"] == "function_call")
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x " * 100}
            body = await server.respond(input=[result], previous_response_id=body["id"], **ask)
            assert body["output"][0]["type"] == "compaction"
            assert unsealed(body["output"][0])[1] == ("the weather in Paris, word for word",)
            assert "x x x" in server.prompt(-2), "the summary has the tool's result"
            assert "x x x" not in server.prompt(), number
        assert body["output"][-1]["content"][0]["text"] == "21 °C in Paris."


async def test_a_compaction_trigger_returns_only_the_summary() -> None:
    async with serve(HELLO, SUMMARY, HELLO) as server:
        _, first = await server.post(input="an old story")
        trigger = [{"type": "compaction_trigger"}]
        events = await server.events(input=trigger, previous_response_id=first["id"])
        body = fold_events(events)
        assert (body["status"], kinds(body)) == ("completed", ["compaction"])
        assert unsealed(body["output"][0]) == ("They said hi.", ()), "the story has been answered"
        assert body["usage"]["input_tokens"] == len(server.prompt_ids(1))
        await server.post(input="go on", previous_response_id=body["id"])
        assert "an old story" not in server.prompt()
        assert server.prompt().endswith(
            f"{TOLD}<|end|><|start|>user<|message|>go on<|end|><|start|>assistant"
        )


async def test_compaction_keeps_declared_tools_and_unanswered_calls() -> None:
    """The tools are declared within the input; the call's output comes after the compaction."""
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "additional_tools", "role": "developer", "tools": [TOOL]},
        {"role": "user", "content": "an old story"},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "compaction", "encrypted_content": seal(pack("They said hi.", ("q?",)))},
        {"type": "function_call_output", "call_id": "c1", "output": "21"},
    ]
    async with serve(CALL) as server:
        body = await server.respond(input=items)
        assert body["output"][-1]["type"] == "function_call", "the tool can still be called"
        text = server.prompt()
        order = [text.index(part) for part in ("Be brief.", "type get_weather", TOLD, "q?", "{}", ">21<")]
        assert order == sorted(order)
        assert "an old story" not in text


async def test_a_failed_summary_fails_the_response() -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ask = {"input": [*history, {"role": "user", "content": "c"}], **at(50)}
    for broken in (Script(ids(THINK), error=EngineError("no")), "<|channel|>final<|message|><|return|>"):
        async with serve(broken, HELLO) as server:
            status, body = await server.post(**ask)
            assert (status, body["error"]["type"]) == (500, "server_error")
            body = (await server.events(**ask))[-1]["response"]
            assert (body["status"], kinds(body)[-1]) == ("completed", "message")
        async with serve(broken) as server:
            body = (await server.events(**ask))[-1]["response"]
            assert (body["status"], body["output"]) == ("failed", [])


async def test_cancelling_during_the_summary_leaves_no_compaction_item() -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    async with serve(Script(ids(SUMMARY), delay=0.05)) as server:
        _, body = await server.post(
            input=[*history, {"role": "user", "content": "c"}], background=True, **at(50)
        )
        await until(lambda: server.client.requests)
        await asyncio.sleep(0.1)  # two tokens of the summary
        (asked,) = server.client.requests
        assert asked.request_id.endswith(".summary"), "the summary is still being written"
        done = (await server.http.post(f"/v1/responses/{body['id']}/cancel")).json()
        assert (done["status"], done["output"]) == ("cancelled", [])


async def test_invalid_compaction_fields_are_refused() -> None:
    async with serve(HELLO) as server:
        for fields, param in (
            ({"context_management": [{"type": "clear_tool_uses"}]}, "context_management[0].type"),
            (at(0), "context_management[0].compact_threshold"),
            ({"context_management": [{"type": "compaction"}] * 2}, "context_management"),
            ({"context_management": "compaction"}, "context_management"),
            ({"input": [{"type": "compaction_trigger"}, {"role": "user", "content": "x"}]}, "input[0]"),
        ):
            status, body = await server.post(**{"input": "x", **fields})
            assert (status, body["error"]["param"]) == (400, param)
