"""Client-side tools (custom, shell, patches, namespaces, tool search): calls, outputs and replay."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chorale.api.responses.items.client_calls import call_object
from chorale.api.responses.items.shell_events import CommandEvent, CommandReader
from chorale.turns.events import ItemOpened
from tests.support.engine.scripted_client import ids
from tests.support.responses import ANSWER, TOOL, fold_events, serve, without_ids

CUSTOM = {"type": "custom", "name": "note", "description": "Writes a note."}
SEARCH = {"type": "tool_search", "execution": "client"}
NAMESPACE = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        {"type": "function", "name": "lookup", "parameters": {"type": "object", "properties": {}}},
        CUSTOM,
    ],
}


def calls(name: str, body: str, kind: str = " <|constrain|>json") -> str:
    return f"<|channel|>commentary to=functions.{name}{kind}<|message|>{body}<|call|>"


async def both(script: str, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Returns the only output item, the events and the prompt. Checks that stream and body agree."""
    async with serve(script) as server:
        answer = await server.respond(input="x", **body)
        events = await server.events(input="x", **body)
        [streamed] = fold_events(events)["output"]
        [item] = answer["output"]
        assert without_ids(streamed) == without_ids(item)
        return item, events, server.prompt()


async def test_a_custom_call_is_the_same_in_body_and_stream() -> None:
    text = 'line "one"\n\tzwei \u00fc \U0001f600'
    script = calls("note", '{"input": "line \\"one\\"\\n\\tzwei \\u00fc \\ud83d\\ude00"}')
    item, events, prompt = await both(script, tools=[CUSTOM])
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "note", text)
    assert item["id"].startswith("ctc_")
    assert "type note = (_: {\ninput: string,\n}) => any;" in prompt
    kinds = [event["type"] for event in events]
    assert "response.custom_tool_call_input.delta" in kinds
    assert "response.custom_tool_call_input.done" in kinds
    deltas = [e["delta"] for e in events if e["type"].endswith("input.delta")]
    assert len(deltas) > 3
    assert "".join(deltas) == text


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("plain text", "plain text"),
        ("{ not json", "{ not json"),
        ('{"text": "x"}', '{"text": "x"}'),
        ('{"input": "a\\ud83d b"}', "a\ufffd b"),
        ('{"input": "a", "more": 1}', "a"),
        ("{}", ""),
        ("", ""),
    ],
)
async def test_any_text_of_a_custom_call_becomes_its_input(written: str, meant: str) -> None:
    item, _, _ = await both(calls("note", written), tools=[CUSTOM])
    assert item["input"] == meant


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "grammar", "syntax": "lark", "definition": "start: ("}, "tools[0].format.definition"),
        ({"type": "grammar", "syntax": "peg", "definition": "x"}, "tools[0].format.syntax"),
        ({"type": "grammar", "syntax": "regex"}, "tools[0].format.definition"),
        ({"type": "grammar", "syntax": "regex", "definition": "(?=x)y"}, "tools[0].format.definition"),
        ({"type": "xml"}, "tools[0].format.type"),
        (5, "tools[0].format.type"),
    ],
)
async def test_unsupported_formats_are_refused_with_their_path(form: Any, param: str) -> None:
    async with serve(ANSWER) as server:
        status, body = await server.post(input="x", tools=[{**CUSTOM, "format": form}])
        assert (status, body["error"]["param"]) == (400, param)


# Kind of call -> its arguments, and what they become in its item.
SHELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "local_shell": (
        '{"command":["ls","-l"],"timeout_ms":500}',
        {"action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 500}},
    ),
    "shell": (
        '{"commands":["ls","pwd"]}',
        {"action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None}},
    ),
    "apply_patch": (
        '{"type":"update_file","path":"a.py","diff":"-a\\n+b"}',
        {"operation": {"type": "update_file", "path": "a.py", "diff": "-a\n+b"}},
    ),
    "tool_search": ('{"query":"mail"}', {"arguments": {"query": "mail"}}),
}


def declared(kind: str) -> dict[str, Any]:
    """Returns the tool of a kind of call."""
    return {"tool_search": SEARCH, "custom": CUSTOM}.get(kind, {"type": kind})


@pytest.mark.parametrize("kind", SHELLS)
async def test_each_kind_of_call_has_its_own_item_form(kind: str) -> None:
    arguments, part = SHELLS[kind]
    item, events, prompt = await both(calls(kind, arguments), tools=[declared(kind)])
    assert item | {"type": f"{kind}_call", "status": "completed", **part} == item
    assert item["call_id"].startswith("call_")
    assert f"type {kind} = (_: {{" in prompt
    told = [e["type"] for e in events if "delta" in e["type"]]
    assert set(told) == ({"response.shell_call_command.delta"} if kind == "shell" else set())


COMMANDS = [
    '{"commands":["ls -l","pwd"]}',
    '{"commands":[]}',
    '{"commands":[""," ","a"]}',
    '{"timeout_ms":5,"max_output_length":null,"commands":["a"]}',
    ' { "commands" : [ "a" , "b" ] , "timeout_ms" : 5 } ',
    '{"unheard_of":[1,{"commands":["x"]}],"commands":["a","b"]}',
    '{"commands":["echo \\"hi\\" \\\\ \\u00fc \\ud83d\\ude00 \U0001f600\\n\\t/"]}',
    '{"commands":["\\ud83d","\\ud83d\\ud83d\\ude00","\\ude00x","\\ud83d\\n"]}',
    '{"commands":["two\nlines"]}',
    '{"commands":["a",5,"b"]}',
    '{"commands":["a"],"commands":["b","c"]}',
    '{"commands":"ls"}',
    '{"commands":["a", "b',
    '{"commands":["a", "b\\u12',
    "ls -l",
    "{}",
    "[]",
]


@pytest.mark.parametrize("arguments", COMMANDS)
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_commands_are_streamed_for_any_split_of_the_arguments(arguments: str, size: int) -> None:
    reader = CommandReader()
    events: list[CommandEvent] = []
    for start in range(0, len(arguments), size):
        events += reader.feed(arguments[start : start + size])
    commands = call_object(
        ItemOpened(0, "sh_1", "shell_call", "shell", call_id="call_1"), "completed", arguments
    )["action"]["commands"]
    events += reader.finish(commands)
    told: list[str] = []
    for kind, number, text in events:
        if kind == "added":
            assert number == len(told)
            told.append("")
        elif kind == "delta":
            told[number] += text
        else:
            assert told[number] == text
    is_cut = not commands and '["a"' in arguments
    if not is_cut and arguments.count("commands") == 1:
        assert told == commands
        assert [kind for kind, _, _ in events if kind != "delta"] == ["added", "done"] * len(commands)
    for text in told:
        text.encode()


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ({"type": "shell", "environment": {"type": "local"}}, '{"commands":["\\ud800 \\ud83d\\ude00"]}'),
        ({"type": "local_shell"}, '{"command":["\\udc00"],"env":{"\\ud800":"\\ud800"}}'),
        ({"type": "apply_patch"}, '{"type":"create_file","path":"\\ud800","diff":"\\ud800"}'),
        (SEARCH, '{"\\ud800":[{"a":"\\ud800"}]}'),
    ],
)
async def test_a_lone_surrogate_in_arguments_is_replaced(tool: dict[str, Any], arguments: str) -> None:
    item, _, _ = await both(calls(tool["type"], arguments), tools=[tool])
    assert "\ufffd" in json.dumps(item, ensure_ascii=False)
    assert item["status"] == "completed"


@pytest.mark.parametrize(
    "written", ["", "{}", "null", '{"path":3,"diff":[],"type":"x","commands":4}', "[" * 3000]
)
@pytest.mark.parametrize("kind", ["apply_patch", "shell", "local_shell", "tool_search", "custom"])
async def test_a_useless_call_can_be_sent_back_with_its_output(kind: str, written: str) -> None:
    """The client sends the call back unchanged with its error, so that the model reads what was wrong."""
    tool = declared(kind)
    answers: dict[str, Any] = {"local_shell": {"output": "no"}, "tool_search": {"tools": []}}
    answers |= {"apply_patch": {"status": "failed", "output": "no path"}, "custom": {"output": "no"}}
    async with serve(calls("note" if kind == "custom" else kind, written), ANSWER) as server:
        body = await server.respond(input="x", tools=[tool])
        [call] = body["output"]
        answer = {
            "type": f"{call['type']}_output",
            "call_id": call["call_id"],
            **answers.get(kind, {"output": []}),
        }
        if kind == "tool_search":
            answer["type"] = "tool_search_output"
        body = await server.respond(input=[{"role": "user", "content": "x"}, call, answer], tools=[tool])


OUTPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "local_shell": ({"output": '{"output":"a.py"}'}, '{"output":"a.py"}'),
    "shell": (
        {"output": [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
        '[{"stdout":"a.py","stderr":"","outcome":{"type":"exit","exit_code":0}}]',
    ),
    "apply_patch": (
        {"status": "failed", "output": "no such file"},
        '{"status":"failed","output":"no such file"}',
    ),
    "tool_search": ({"tools": [TOOL], "execution": "client"}, '{"loaded":["get_weather"]}'),
}


@pytest.mark.parametrize("name", SHELLS)
@pytest.mark.parametrize("by_id", [True, False])
async def test_outputs_follow_the_replayed_tokens_of_their_calls(name: str, by_id: bool) -> None:
    tool, script = declared(name), calls(name, SHELLS[name][0])
    fields, read = OUTPUTS[name]
    kind = "tool_search_output" if name == "tool_search" else f"{name}_call_output"
    async with serve(script, ANSWER) as server:
        _, first = await server.post(input="x", tools=[tool])
        [item] = first["output"]
        output = {"type": kind, "call_id": item["call_id"], **fields}
        if name == "local_shell":  # the SDK's types have it in ``id``
            output["id"] = output.pop("call_id")
        if by_id:
            continued: dict[str, Any] = {"input": [output], "previous_response_id": first["id"]}
        else:
            continued = {"input": [{"role": "user", "content": "x"}, item, output]}
        await server.respond(tools=[tool], **continued)
        before = server.prompt_ids(0) + ids(script)
        assert server.prompt_ids(1)[: len(before)] == before
        shown = f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{read}<|end|>"
        assert shown in server.prompt()
        if name == "tool_search":
            assert "type get_weather" in server.prompt().partition(shown)[2]


async def test_an_edited_call_replaces_the_stored_one() -> None:
    async with serve(calls("get_weather", '{"city":"Oslo"}'), ANSWER) as server:
        _, first = await server.post(input="x", tools=[TOOL])
        [call] = first["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "warm"}
        edited = call | {"arguments": '{"city":"Rome"}'}
        await server.post(input=[{"role": "user", "content": "x"}, edited, output], tools=[TOOL])
        assert '{"city":"Rome"}' in server.prompt()
        assert "Oslo" not in server.prompt()


@pytest.mark.parametrize("name", SHELLS)
async def test_a_call_of_another_server_is_rendered_from_its_item(name: str) -> None:
    async with serve(ANSWER) as server:
        foreign = {"type": f"{name}_call", "call_id": "c1", "status": "completed", **SHELLS[name][1]}
        given = [{"role": "user", "content": "x"}, foreign]
        await server.respond(input=given, tools=[declared(name)])
        assert f"to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>" in server.prompt()


async def test_tools_of_a_namespace_have_prefixed_names_in_the_prompt() -> None:
    item, _, prompt = await both(calls("crm__lookup", "{}"), tools=[NAMESPACE, TOOL])
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "lookup", "crm")
    assert "// crm__*: Customers.\nnamespace functions {" in prompt
    assert "type crm__lookup" in prompt
    item, _, _ = await both(calls("crm__note", '{"input":"hi"}'), tools=[NAMESPACE])
    assert (item["type"], item["name"], item["namespace"], item["input"]) == (
        "custom_tool_call",
        "note",
        "crm",
        "hi",
    )


async def test_a_namespaced_call_is_rendered_under_its_prefixed_name() -> None:
    async with serve(ANSWER) as server:
        made = {
            "type": "function_call",
            "call_id": "c",
            "name": "lookup",
            "namespace": "crm",
            "arguments": "{}",
        }
        output = {"type": "function_call_output", "call_id": "c", "output": "none"}
        await server.respond(input=[made, output], tools=[NAMESPACE])
        assert "<|start|>functions.crm__lookup to=assistant" in server.prompt()


async def test_tools_declared_in_the_input_may_be_called_and_chosen() -> None:
    async with serve(calls("get_weather", '{"city":"Rome"}')) as server:
        listed = {"type": "additional_tools", "role": "developer", "tools": [TOOL]}
        _, body = await server.post(
            input=[{"role": "user", "content": "x"}, listed],
            tool_choice={"type": "function", "name": "get_weather"},
        )
        [item] = body["output"]
        assert (item["type"], item["name"]) == ("function_call", "get_weather")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "custom", "name": "note"}, ["note"]),
        ({"type": "shell"}, ["shell"]),
        ({"type": "apply_patch"}, ["apply_patch"]),
        ({"type": "function", "name": "lookup", "namespace": "crm"}, ["crm__lookup"]),
        ({"type": "function", "name": "lookup"}, ["crm__lookup"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "crm"}]},
         ["crm__lookup", "crm__note"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}, {"type": "web_search"},
          {"type": "custom", "name": "note"}]}, ["shell", "note"]),
    ],
)  # fmt: skip
async def test_every_kind_of_tool_choice_limits_the_callable_tools(choice: Any, names: list[str]) -> None:
    async with serve(ANSWER) as server:
        tools = [CUSTOM, {"type": "shell"}, {"type": "apply_patch"}, NAMESPACE, TOOL]
        body = await server.respond(input="x", tools=tools, tool_choice=choice)
        assert body["tool_choice"] == choice
        grammar = server.client.requests[0].sampling.grammar or ""
        found = {n for n in ("note", "shell", "apply_patch", "crm__lookup", "crm__note", "get_weather")
                 if f" to=functions.{n}\\" in grammar}  # fmt: skip
        assert found == set(names)
        assert "crm__lookup" in server.prompt()  # all tools stay in the prompt, for the prefix cache


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "get_weather"},
        {"type": "function", "name": "note"},
        {"type": "shell"},
        {"type": "tool_search"},
        {"type": "function", "name": "get_weather", "namespace": "crm"},
        {"type": "allowed_tools", "mode": "auto"},
        {"type": "allowed_tools", "tools": ["note"]},
        {"type": "allowed_tools", "mode": "none", "tools": []},
        {"type": "allowed_tools", "mode": "required", "tools": []},
        {"type": "mcp"},
        {"type": "web_search"},
        {"type": "file_search"},
        {"type": 5},
        {"type": "function"},
    ],
)
async def test_invalid_tool_choices_are_refused(choice: Any) -> None:
    async with serve(ANSWER) as server:
        status, body = await server.post(input="x", tools=[CUSTOM, TOOL], tool_choice=choice)
        assert (status, body["error"]["param"]) == (400, "tool_choice"), body


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "namespace", "name": "a b", "tools": []}, "tools[0].name"),
        ({"type": "namespace", "name": "a"}, "tools[0].tools"),
        ({"type": "namespace", "name": "a", "tools": [{"type": "shell"}]}, "tools[0].tools[0].type"),
        ({"type": "namespace", "name": "a", "tools": [], "description": 5}, "tools[0].description"),
        ({"type": "function", "name": "f", "parameters": {"type": "string"}}, "tools[0].parameters.type"),
        ({"type": "custom"}, "tools[0].name"),
        ({"type": "custom", "name": "x", "description": 4}, "tools[0].description"),
        ({"type": "tool_search", "execution": "client", "parameters": 5}, "tools[0].parameters"),
    ],
)
async def test_invalid_tools_are_refused(tool: dict[str, Any], param: str) -> None:
    async with serve(ANSWER) as server:
        status, body = await server.post(input="x", tools=[tool])
        assert (status, body["error"]["param"]) == (400, param), body


async def test_required_calls_have_an_object_as_arguments_even_if_null_is_allowed() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": ["object", "null"]}}
    async with serve(calls("f", "{}")) as server:
        await server.respond(input="x", tools=[tool], tool_choice="required")
        grammar = server.client.requests[0].sampling.grammar.replace(" ", "").replace("\\", "")
        assert '"type":"object"' in grammar
        assert '"null"' not in grammar
