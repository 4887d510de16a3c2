"""The unmodified OpenAI SDK against the server in process; its stream parser raises for invalid streams."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from chorale.harmony.vocab import CALL as CALL_ID
from chorale.harmony.vocab import END, START
from tests.support.engine.scripted_client import ids
from tests.support.responses import ANSWER, CALL, HELLO, MODEL, TOOL, serve

SDK_TOOL: Any = TOOL


def check_exact_prefix(server: Any, output_script: str) -> None:
    """Checks that the second prompt begins with the tokens of the first prompt and of the model's output."""
    first, second = server.prompt_ids(0), server.prompt_ids(1)
    said = [*first, *ids(output_script)]
    assert second[: len(said)] == said
    rest = second[len(said) :]
    assert rest[0] == START
    assert rest[-2:] == [START, ids("assistant")[0]]
    assert CALL_ID not in rest
    assert END in rest


async def test_stripped_reasoning_is_restored_from_the_store() -> None:
    """Clients that keep only encrypted_content send reasoning items back empty."""
    async with serve(CALL, ANSWER) as server:
        first = await server.sdk.responses.create(
            model=MODEL, input="Weather?", tools=[SDK_TOOL], include=["reasoning.encrypted_content"]
        )
        reasoning, call = first.output
        assert reasoning.type == "reasoning"
        assert reasoning.encrypted_content
        assert call.type == "function_call"
        history: list[Any] = [
            {"role": "user", "content": "Weather?"},
            {"type": "reasoning", "id": reasoning.id, "summary": [], "encrypted_content": None},
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "21"},
        ]
        await server.sdk.responses.create(model=MODEL, input=history, tools=[SDK_TOOL])
        check_exact_prefix(server, CALL)


async def test_item_references_are_replaced_by_stored_items() -> None:
    async with serve(CALL, ANSWER) as server:
        first = await server.sdk.responses.create(model=MODEL, input="Weather?", tools=[SDK_TOOL])
        call = first.output[1]
        assert call.type == "function_call"
        history: list[Any] = [
            {"role": "user", "content": "Weather?"},
            {"type": "item_reference", "id": first.output[0].id},
            {"id": call.id},
            {"type": "function_call_output", "call_id": call.call_id, "output": "21"},
        ]
        second = await server.sdk.responses.create(model=MODEL, input=history, tools=[SDK_TOOL])
        check_exact_prefix(server, CALL)
        listed = await server.sdk.responses.input_items.list(second.id, order="asc")
        assert [item.type for item in listed.data] == [
            "message",
            "reasoning",
            "function_call",
            "function_call_output",
        ]
        with pytest.raises(openai.NotFoundError, match="msg_0000"):
            await server.sdk.responses.create(
                model=MODEL, input=[{"type": "item_reference", "id": "msg_" + "0" * 32}]
            )


async def test_an_edited_answer_replaces_the_stored_one() -> None:
    async with serve(HELLO) as server:
        first = await server.sdk.responses.create(model=MODEL, input="hello")
        message = first.output[1].model_dump()
        message["content"][0]["text"] = "Edited!"
        history: list[Any] = [
            {"role": "user", "content": "hello"},
            message,
            {"role": "user", "content": "and?"},
        ]
        await server.sdk.responses.create(model=MODEL, input=history)
        assert "Edited!" in server.prompt()
        assert "Hi there!" not in server.prompt()


async def test_input_items_are_listed_in_pages() -> None:
    async with serve(HELLO) as server:
        inputs: list[Any] = [{"role": "user", "content": f"number {n}"} for n in range(7)]
        response = await server.sdk.responses.create(model=MODEL, input=inputs)
        for order in ("asc", "desc"):
            found = [
                item
                async for item in server.sdk.responses.input_items.list(response.id, limit=3, order=order)  # type: ignore[arg-type]
            ]
            texts = [item.content[0].text for item in found]  # type: ignore[union-attr]
            expected = [f"number {n}" for n in range(7)]
            assert texts == (expected if order == "asc" else expected[::-1])


async def test_errors_raise_the_matching_sdk_exceptions() -> None:
    async with serve(HELLO) as server:
        with pytest.raises(openai.NotFoundError) as missing:
            await server.sdk.responses.create(model="other", input="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError) as unknown:
            await server.sdk.responses.create(model=MODEL, input="x", previous_response_id="resp_" + "0" * 32)
        assert unknown.value.code == "previous_response_not_found"
        assert unknown.value.param == "previous_response_id"
        assert "resp_" + "0" * 32 in unknown.value.message
        response = await server.sdk.responses.create(model="alias", input="x")
        assert response.model == MODEL
