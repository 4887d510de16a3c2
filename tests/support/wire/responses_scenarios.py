"""Responses and conversations: every kind of item, tool, event and end."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support.engine.scripted_client import Script
from tests.support.scripted import ANALYSIS, FINAL, call
from tests.support.server import Server
from tests.support.wire.server import post
from tests.support.wire.words import (
    BARE,
    BROKEN,
    CALL,
    CHAT_HI,
    CITED,
    CODE,
    CONVERSATIONS,
    ECHO,
    FAILED,
    FIND,
    GET,
    HELLO,
    JSON,
    MCP,
    OPEN,
    RESPONSES,
    RETURN,
    SCHEMA,
    SEARCH,
    SERVER_TOOLS,
    STREAMED,
    THINK,
)


async def responses_text(server: Server) -> None:
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for stream in STREAMED:
        ask: dict[str, Any] = {"input": "hi", "stream": stream}
        server.client.play(HELLO, num_cached_tokens=4)
        await post(server, RESPONSES, **ask)
        await post(server, RESPONSES, **ask, include=["reasoning.encrypted_content"], store=False)
        await post(server, RESPONSES, **ask, **logprobs)
        await post(server, RESPONSES, **ask, include_reasoning=False, stop=["there"], user="u")
        await post(
            server, RESPONSES, **ask, reasoning={"effort": "low", "summary": "auto"}, instructions="Be kind."
        )
        if stream:
            await post(server, RESPONSES, **ask, stream_options={"include_obfuscation": True})
        server.client.play(JSON)
        await post(server, RESPONSES, **ask, text={"format": form, "verbosity": "low"})
        await post(server, RESPONSES, **ask, text={"format": {"type": "json_object"}})
        for text in (f"{ANALYSIS}Half", f"{THINK}{FINAL}Half", THINK + call("get", '{"n":')):
            server.client.play(text)
            await post(server, RESPONSES, **ask, tools=[GET], max_output_tokens=100)
        server.client.play(BROKEN)
        await post(server, RESPONSES, 200 if stream else 503, **ask)


CLIENT_TOOLS: tuple[tuple[dict[str, Any], str], ...] = (
    (GET, call("get", '{"n":1}')),
    (BARE, call("ping", "")),
    ({"type": "custom", "name": "note"}, call("note", '{"input":"text"}')),
    ({"type": "local_shell"}, call("local_shell", '{"command":["ls"],"timeout_ms":5}')),
    ({"type": "local_shell"}, call("local_shell", '{"command":["ls"]}')),
    ({"type": "shell"}, call("shell", '{"commands":["ls","pwd"]}')),
    (
        {"type": "shell", "environment": {"type": "local"}},
        call("shell", '{"commands":["ls"],"timeout_ms":5}'),
    ),
    ({"type": "apply_patch"}, call("apply_patch", '{"type":"create_file","path":"a","diff":"+a"}')),
    ({"type": "apply_patch"}, call("apply_patch", '{"type":"delete_file","path":"a","diff":""}')),
    ({"type": "tool_search", "execution": "client"}, call("tool_search", '{"query":"q"}')),
    (
        {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [GET]},
        call("crm__get", '{"n":1}'),
    ),
)


async def responses_client_tools(server: Server) -> None:
    for stream, (declared, written) in itertools.product(STREAMED, CLIENT_TOOLS):
        server.client.play(THINK + written + CALL)
        await post(server, RESPONSES, input="hi", tools=[declared], stream=stream)
    functions = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get"}]}
    for choice in ("none", "required", {"type": "function", "name": "get"}, functions):
        server.client.play(THINK + call("get", '{"n":1}') + CALL)
        await post(
            server, RESPONSES, input="hi", tools=[GET, BARE], tool_choice=choice, parallel_tool_calls=False
        )


async def responses_server_tools(server: Server) -> None:
    include = [
        "web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs",
        "reasoning.encrypted_content",
    ]  # fmt: skip
    for stream, included in itertools.product(STREAMED, (None, include)):
        ask: dict[str, Any] = {"input": "hi", "stream": stream}
        ask |= {} if included is None else {"include": included}
        server.client.play(SEARCH, OPEN, FIND, CODE, ECHO, FAILED, CITED)
        await post(server, RESPONSES, **ask, tools=SERVER_TOOLS)
        server.client.play(CODE.removesuffix(CALL))
        await post(server, RESPONSES, **ask, tools=SERVER_TOOLS)
        dead = {**MCP, "server_label": "dead"}
        server.client.play(HELLO)
        await post(server, RESPONSES, **ask, tools=[dead])
        server.client.play(ECHO)
        asking = {key: value for key, value in MCP.items() if key != "require_approval"}
        await post(server, RESPONSES, **ask, tools=[asking])
    request = (await post(server, RESPONSES, input="hi", tools=[asking]))["output"][-1]
    answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    server.client.play(CITED)
    for approve, reason in ((True, None), (False, "no")):
        told = {**answer, "approve": approve, **({"reason": reason} if reason else {})}
        body = await post(server, RESPONSES, input=[request, told], tools=[asking])
        await server.ask("GET", f"{RESPONSES}/{body['id']}/input_items")


async def responses_background(server: Server) -> None:
    server.client.play(HELLO)
    for stream in STREAMED:
        made = await post(server, RESPONSES, input="hi", background=True, stream=stream)
        response_id = made[0]["response"]["id"] if stream else made["id"]
        await server.ended(response_id)
        await server.ask("GET", f"{RESPONSES}/{response_id}?stream=true")
        await server.ask("GET", f"{RESPONSES}/{response_id}?stream=true&starting_after=3")
    server.client.play(BROKEN)
    await server.ended((await post(server, RESPONSES, input="hi", background=True))["id"])
    server.client.play(Script(BROKEN.token_ids, hang=True))
    made = await post(server, RESPONSES, input="hi", background=True)
    await server.ask("POST", f"{RESPONSES}/{made['id']}/cancel")
    await server.ended(made["id"])
    await server.ask("GET", f"{RESPONSES}/{made['id']}?stream=true")
    await server.ask("DELETE", f"{RESPONSES}/{made['id']}")


async def responses_compaction(server: Server) -> None:
    summary = f"{THINK}{FINAL}They said hi.{RETURN}"
    at = [{"type": "compaction", "compact_threshold": 20}]
    story = [{"role": "user", "content": "an old story"}, {"role": "assistant", "content": "Nice."}]
    for stream in STREAMED:
        server.client.play(summary, HELLO)
        ask = [*story, {"role": "user", "content": "and now?"}]
        await post(server, RESPONSES, input=ask, context_management=at, stream=stream)
        server.client.play(summary)
        await post(server, RESPONSES, input=[*story, {"type": "compaction_trigger"}], stream=stream)
    compacted = await post(server, f"{RESPONSES}/compact", input=story)
    body = await post(server, RESPONSES, input=[*compacted["output"], *CHAT_HI])
    await server.ask("GET", f"{RESPONSES}/{body['id']}/input_items")
    await server.ask("POST", f"{RESPONSES}/input_tokens", input="hi")


SHELL_OUTPUT = {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
TIMED_OUT = {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}}
# Every kind of input item, in the shortest accepted form.
ITEMS: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "hi"},
    {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
    {"role": "system", "content": "Be brief."},
    {"type": "message", "role": "assistant", "content": "Hello.", "phase": "final_answer"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"type": "reasoning", "summary": []},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S."}], "encrypted_content": None},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "reasoning", "summary": [], "encrypted_content": "gAAA-of-another-server"},
    {"type": "function_call", "call_id": "c1", "name": "get", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
    {"type": "function_call", "call_id": "c2", "name": "get", "namespace": "crm", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    {"type": "custom_tool_call", "call_id": "c3", "name": "note", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
    {"type": "local_shell_call", "call_id": "c4", "action": {"type": "exec", "command": ["ls"], "env": {}}},
    {"type": "local_shell_call_output", "id": "c4", "output": "a"},
    {"type": "shell_call", "call_id": "c5", "action": {"commands": ["ls"]}},
    {"type": "shell_call_output", "call_id": "c5", "output": [SHELL_OUTPUT, TIMED_OUT]},
    {
        "type": "apply_patch_call",
        "call_id": "c6",
        "operation": {"type": "create_file", "path": "a", "diff": "+a"},
    },
    {"type": "apply_patch_call_output", "call_id": "c6", "status": "completed"},
    {"type": "apply_patch_call", "call_id": "c7", "operation": {"type": "delete_file", "path": "a"}},
    {"type": "apply_patch_call_output", "call_id": "c7", "status": "failed", "output": "no"},
    {"type": "tool_search_call", "call_id": "c8", "execution": "client", "arguments": {"query": "q"}},
    {"type": "tool_search_output", "call_id": "c8", "execution": "client", "tools": [BARE]},
    {"type": "additional_tools", "role": "developer", "tools": [{**BARE, "name": "pong"}]},
    {"type": "web_search_call", "action": {"type": "search", "query": "q"}},
    {"type": "web_search_call", "action": {"type": "open_page", "url": "https://example.com"}},
    {"type": "web_search_call", "action": {"type": "find_in_page", "url": "https://a.com", "pattern": "p"}},
    {"type": "code_interpreter_call", "code": "1", "container_id": "c"},
    {"type": "mcp_list_tools", "server_label": "srv", "tools": [{"name": "echo", "input_schema": {}}]},
    {"type": "mcp_call", "server_label": "srv", "name": "echo", "arguments": "{}"},
    {"type": "mcp_call", "server_label": "srv", "name": "echo", "arguments": "{}", "output": "x"},
    {"type": "mcp_approval_request", "server_label": "srv", "name": "echo", "arguments": "{}"},
)


async def responses_items(server: Server) -> None:
    server.client.play(HELLO)
    body = await post(server, RESPONSES, input=list(ITEMS))
    listed = f"{RESPONSES}/{body['id']}/input_items"
    await server.ask("GET", f"{listed}?limit=100")
    again = await post(server, RESPONSES, input="more", previous_response_id=body["id"])
    await server.ask("GET", f"{RESPONSES}/{again['id']}")
    replayed = [*body["output"], *CHAT_HI, {"type": "item_reference", "id": body["output"][-1]["id"]}]
    last = await post(server, RESPONSES, input=replayed)
    await server.ask("GET", f"{RESPONSES}/{last['id']}/input_items")
    await server.ask("GET", f"{listed}?order=asc&limit=1")
    file = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk="}
    body = await post(server, RESPONSES, input=[{"role": "user", "content": [file]}])
    await server.ask("GET", f"{RESPONSES}/{body['id']}/input_items")


async def conversations(server: Server) -> None:
    server.client.play(HELLO)
    made = await server.ask("POST", CONVERSATIONS, metadata={"a": "b"})
    one = f"{CONVERSATIONS}/{made['id']}"
    await server.ask("GET", f"{one}/items")
    for start in range(0, len(ITEMS), 20):
        await server.ask("POST", f"{one}/items", items=list(ITEMS[start : start + 20]))
    for stream in STREAMED:
        await post(server, RESPONSES, input="hi", conversation=made["id"], stream=stream)
    listed = await server.ask("GET", f"{one}/items?limit=100")
    for item in listed["data"]:
        await server.ask("GET", f"{one}/items/{item['id']}")
    await server.ask("DELETE", f"{one}/items/{listed['data'][0]['id']}")
    await server.ask("GET", one)
    await server.ask("POST", one, metadata={})
    await server.ask("DELETE", one)
    await server.ask("POST", CONVERSATIONS)
