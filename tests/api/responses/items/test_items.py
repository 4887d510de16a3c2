"""Conversion of items to harmony messages: nothing is dropped silently, and outputs follow their calls."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.api.responses.items.input import parse_items
from chorale.api.responses.items.to_harmony import check_outputs, to_groups
from chorale.errors import RequestError
from chorale.harmony.messages import Message
from chorale.store.protocol import StoredItem
from tests.support.responses import ANSWER, CALL, HELLO, TOOL, serve
from tests.support.server import VOCAB


def messages(items: list[dict[str, Any]]) -> list[Message]:
    stored = [StoredItem(item) for item in parse_items(items)]
    check_outputs(stored)
    return [message for group in to_groups(stored) for message in group]


def call(call_id: str, arguments: str = "{}", name: str = "f") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, text: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


USER = {"role": "user", "content": "hi"}


def test_each_output_follows_its_call() -> None:
    """Even if the client sends the outputs in another order."""
    for outputs in ([output("a", "1"), output("b", "2")], [output("b", "2"), output("a", "1")]):
        found = messages([USER, call("a", '{"x":1}'), call("b", '{"x":2}', "g"), *outputs])
        assert [(m.role, m.name or m.recipient, m.content) for m in found[1:]] == [
            ("assistant", "functions.f", '{"x":1}'),
            ("tool", "functions.f", "1"),
            ("assistant", "functions.g", '{"x":2}'),
            ("tool", "functions.g", "2"),
        ]
        assert all(
            m.recipient == "assistant" and m.channel == "commentary" for m in found if m.role == "tool"
        )


@pytest.mark.parametrize("items", [[USER, output("zzz", "1"), call("zzz")], [USER, output("zzz", "1")]])
def test_an_output_without_an_earlier_call_is_refused(items: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError) as caught:
        messages(items)
    assert caught.value.param == "input[1].call_id"


def test_assistant_messages_get_the_channel_of_a_preamble_or_an_answer() -> None:
    found = messages(
        [
            USER,
            {"role": "assistant", "content": "Let me look."},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            call("a"),
            output("a", "1"),
            {"role": "assistant", "content": [{"type": "output_text", "text": "Here."}]},
            {"role": "assistant", "content": "Still looking.", "phase": "commentary"},
            {"role": "assistant", "content": "Done.", "phase": "final_answer"},
            call("b"),
        ]
    )
    channels = [m.channel for m in found if m.role == "assistant"]
    assert channels == ["commentary", "analysis", "commentary", "final", "commentary", "final", "commentary"]


def test_reasoning_is_read_in_every_form() -> None:
    forms: list[dict[str, Any]] = [
        {"content": [{"type": "reasoning_text", "text": "x"}], "summary": []},
        {"content": None, "summary": [{"type": "summary_text", "text": "x"}]},
        {"content": "x"},
        {
            "summary": [{"type": "summary_text", "text": "x"}],
            "encrypted_content": "gAAAA",
            "id": "rs_foreign",
        },
    ]
    for form in forms:
        assert [m.content for m in messages([USER, {"type": "reasoning", **form}])] == ["hi", "x"]
    assert len(messages([USER, {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}])) == 1


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_file", "file_id": "f"}]},
         "content[1].type"),
        (output("a", [{"type": "input_image", "image_url": "x"}]), "output[0].type"),
        ({"type": "web_search_call", "action": {"type": "x"}}, "action"),
        ({"type": "code_interpreter_call", "outputs": [{"type": "image", "url": "x"}]}, "outputs[0]"),
        ({"type": "mcp_call", "server_label": "a", "arguments": "{}"}, "name"),
        ({"type": "mcp_approval_response", "approval_request_id": "x"}, "approve"),
        ({"type": "image_generation_call", "id": "ig_1"}, "type"),
        ({"type": "custom_tool_call", "call_id": "x"}, "input"),
        ({"type": "local_shell_call", "call_id": "x"}, "action"),
        ({"type": "shell_call", "call_id": "x", "action": {"commands": "ls"}}, "action.commands"),
        ({"type": "apply_patch_call", "call_id": "x", "operation": {"type": "x"}}, "operation.type"),
        ({"type": "custom_tool_call_output", "call_id": "x"}, "output"),
        ({"type": "tool_search_output", "call_id": "x", "tools": 5}, "tools"),
        ({"type": {"a": 1}}, "type"),
        ({"role": "tool", "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": [5]}, "content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "content[0].text"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "call_id"),
        (call("a", name="a b to=x"), "name"),
        ({**call("a"), "arguments": 5}, "arguments"),
        ({"type": "function_call_output", "call_id": "a"}, "output"),
        ({"type": "item_reference"}, "id"),
        ({}, "id"),
        ({"type": "reasoning", "content": [{"type": "image"}]}, "content[0].type"),
    ],
)  # fmt: skip
def test_invalid_items_are_refused_with_their_path(item: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_items([USER, item])
    assert caught.value.param == f"input[1].{param}"


async def test_instructions_are_not_inherited() -> None:
    async with serve(HELLO) as server:
        _, first = await server.post(input="one", instructions="old rules", tools=[TOOL])
        _, second = await server.post(input="two", instructions="new rules", previous_response_id=first["id"])
        assert second["instructions"] == "new rules"
        assert "old rules" not in server.prompt()
        assert "get_weather" not in server.prompt()
        _, third = await server.post(input="three", previous_response_id=second["id"])
        text = server.prompt()
        assert third["instructions"] is None
        assert "rules" not in text
        assert [text.count(word) for word in ("one", "two", "three", "Hi there!")] == [1, 1, 1, 2]
        assert "Say hi." not in text  # the reasoning of finished turns is dropped
        await server.post(input="four", previous_response_id=third["id"], reasoning={"context": "all_turns"})
        assert server.prompt().count("Say hi.") == 3


async def test_text_after_a_stop_string_is_not_replayed() -> None:
    async with serve(HELLO) as server:
        _, first = await server.post(input="one", stop=[" there"])
        assert first["output"][1]["content"][0]["text"] == "Hi"
        await server.post(input="two", previous_response_id=first["id"])
        assert "<|channel|>final<|message|>Hi<|end|>" in server.prompt()


async def test_branches_of_one_parent_are_independent() -> None:
    async with serve(CALL, ANSWER, HELLO, ANSWER) as server:
        _, root = await server.post(input="go", tools=[TOOL])
        call_id = root["output"][1]["call_id"]
        results = [output(call_id, "left"), output(call_id, "right")]
        prompts = []
        for result in (*results, results[0]):
            await server.post(input=[result], previous_response_id=root["id"], tools=[TOOL])
            prompts.append(server.prompt_ids())
        assert prompts[0] == prompts[2]
        assert prompts[0] != prompts[1]
        assert "left" not in VOCAB.decode(prompts[1])


async def test_a_stored_call_with_another_call_id_is_the_clients_call() -> None:
    """Its output has the new id, too."""
    async with serve(CALL, ANSWER) as server:
        _, root = await server.post(input="go", tools=[TOOL])
        changed = root["output"][1] | {"call_id": "own"}
        await server.respond(input=[USER, changed, output("own", "warm")], tools=[TOOL])
