"""Custom tools in Chat: declared, called, streamed, chosen, and sent back."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.api.chat.test_http import both
from tests.support.scripted import ANALYSIS, FINAL, NEXT, call, playing
from tests.support.server import served

TEXT: dict[str, Any] = {"type": "custom", "custom": {"name": "note", "description": "Writes a note."}}
SQL: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "sql",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "SELECT [a-z]+"}},
    },
}
EMPTY: dict[str, Any] = {"type": "grammar", "grammar": {}}
FUNCTION = {"type": "function", "function": {"name": "f"}}
NOTE = call("note", '{"input": "line 1\\nline \\"2\\""}') + "<|call|>"
QUERY = "<|channel|>commentary to=functions.sql<|message|>SELECT a<|call|>"


async def test_a_custom_call_is_equal_in_body_and_stream() -> None:
    async with served(playing(ANALYSIS + "T." + NEXT + NOTE)) as server:
        body, chunks = await both(server, tools=[TEXT])
    ChatCompletion.model_validate(body)
    choice = body["choices"][0]
    [made] = choice["message"]["tool_calls"]
    assert made["id"].startswith("call_")
    assert (made["type"], made["custom"]) == ("custom", {"name": "note", "input": 'line 1\nline "2"'})
    assert choice["finish_reason"] == "tool_calls"
    pieces = [p for c in chunks for p in c["choices"][0]["delta"].get("tool_calls", ())]
    assert (pieces[0]["type"], pieces[0]["custom"]) == ("custom", {"name": "note", "input": ""})
    assert all(set(piece) == {"index", "custom"} for piece in pieces[1:])
    assert "".join(piece["custom"]["input"] for piece in pieces) == 'line 1\nline "2"'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_an_empty_custom_input_stays_empty() -> None:
    """Empty arguments of a function become an empty object."""
    empty = "<|channel|>commentary to=functions.{}<|message|><|call|><|start|>assistant"
    script = (empty.format("sql") + empty.format("f")).removesuffix("<|start|>assistant")
    async with served(playing(script)) as server:
        body = (await server.chat(tools=[SQL, FUNCTION])).json()
    custom, function = body["choices"][0]["message"]["tool_calls"]
    assert (custom["custom"]["input"], function["function"]["arguments"]) == ("", "{}")


async def test_function_and_custom_calls_share_one_numbering() -> None:
    script = call("f", "{}") + "<|call|><|start|>assistant" + NOTE
    async with served(playing(script)) as server:
        body, chunks = await both(server, tools=[FUNCTION, TEXT])
    assert [made["type"] for made in body["choices"][0]["message"]["tool_calls"]] == ["function", "custom"]
    heads = [p for c in chunks for p in c["choices"][0]["delta"].get("tool_calls", ()) if "id" in p]
    assert [(head["index"], head["type"]) for head in heads] == [(0, "function"), (1, "custom")]


async def test_the_grammar_of_a_custom_tool_is_described_and_enforced() -> None:
    async with served(playing(QUERY)) as server:
        first = (await server.chat(tools=[SQL])).json()["choices"][0]["message"]
        assert first["tool_calls"][0]["custom"] == {"name": "sql", "input": "SELECT a"}
        assert "type sql = (_: string) => any;" in server.prompt()
        assert "SELECT [a-z]+" in server.prompt()
        assert "SELECT [a-z]+" in (server.client.requests[0].sampling.grammar or "")
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3 rows"}
        messages = [{"role": "user", "content": "hi"}, first, result]
        response = await server.http.post("/v1/chat/completions", json={"messages": messages, "tools": [SQL]})
        assert response.status_code == 200, response.text
        assert "to=functions.sql<|channel|>commentary<|message|>SELECT a<|call|>" in server.prompt()
        assert (
            "<|start|>functions.sql to=assistant<|channel|>commentary<|message|>3 rows<|end|>"
            in server.prompt()
        )


async def test_a_custom_call_of_the_history_is_rendered() -> None:
    made = {"id": "c1", "type": "custom", "custom": {"name": "note", "input": 'a "b"'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    async with served(playing(FINAL + "ok<|return|>")) as server:
        await server.http.post("/v1/chat/completions", json={"messages": messages, "tools": [TEXT]})
        shown = (
            'to=functions.note<|channel|>commentary <|constrain|>json<|message|>{"input":"a \\"b\\""}<|call|>'
        )
        assert shown in server.prompt()
        assert "<|channel|>commentary<|message|>Wait.<|end|>" in server.prompt()


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "custom", "custom": {"name": "note"}}, {"note"}),
        ({"type": "function", "function": {"name": "f"}}, {"f"}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [SQL, FUNCTION]}},
            {"sql", "f"},
        ),
        ("required", {"note", "sql", "f"}),
    ],
    ids=["custom", "function", "allowed", "required"],
)
async def test_tool_choice_restricts_which_tools_the_grammar_allows(choice: Any, names: set[str]) -> None:
    async with served(playing(NOTE)) as server:
        response = await server.chat(tools=[TEXT, SQL, FUNCTION], tool_choice=choice)
        assert response.status_code == 200, response.text
        grammar = server.client.requests[0].sampling.grammar or ""
        assert {name for name in ("note", "sql", "f") if f" to=functions.{name}\\" in grammar} == names


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "format": EMPTY}}]},
         "tools[0].custom.format.grammar.definition"),
        ({"tools": [TEXT], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TEXT, {"type": "function", "function": {"name": "note"}}]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}]},
         "messages[0].tool_calls[0].custom"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "type": "custom", "custom": {"name": "n", "input": 5}}]}]},
         "messages[0].tool_calls[0].custom.input"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "shell"}]}]},
         "messages[0].tool_calls[0].type"),
    ],
)  # fmt: skip
async def test_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    async with served(playing(NOTE)) as server:
        response = await server.chat(**fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
