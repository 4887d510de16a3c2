"""What is asked of the server so that every kind of answer, item and event goes out at least once."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from recorder import DIALECT, Recorder
from wire_server import KEY, MODEL, Server, served

from chorale.client.scripted import Script
from chorale.errors import EngineDeadError
from chorale.harmony.vocab import load_vocabulary

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
RETURN, CALL = "<|return|>", "<|call|>"
THINK = f"{ANALYSIS}Hm.{NEXT}"
HELLO = f"{THINK}{FINAL}Hi there!{RETURN}"
JSON = f'{THINK}{FINAL}{{"n":1}}{RETURN}'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
STREAMED = (False, True)
RESPONSES, CHAT, MESSAGES = "/v1/responses", "/v1/chat/completions", "/v1/messages"
CONVERSATIONS = "/v1/conversations"
CHAT_HI = [{"role": "user", "content": "hi"}]


def call(name: str, arguments: str, kind: str = " <|constrain|>json") -> str:
    return f"<|channel|>commentary to=functions.{name}{kind}<|message|>{arguments}"


def tool(recipient: str, text: str, channel: str = "analysis") -> str:
    return f"{THINK}<|channel|>{channel} to={recipient} code<|message|>{text}{CALL}"


SEARCH = tool("browser.search", '{"query":"q"}')
OPEN = tool("browser.open", '{"id":0}')
FIND = tool("browser.find", '{"pattern":"p"}')
CITED = f"{FINAL}It is so【0†L0-L0】.{RETURN}"
CODE = tool("python", "print(42)")
ECHO = tool("srv.echo", '{"text":"x"}', "commentary")
FAILED = tool("srv.echo", '{"text":"fail"}', "commentary")
BROKEN = Script(
    load_vocabulary().encode_with_special(f"{THINK}{FINAL}Half"), error=EngineDeadError("it died")
)
MCP = {
    "type": "mcp",
    "server_label": "srv",
    "server_url": "https://example.com/mcp",
    "require_approval": "never",
}
SERVER_TOOLS = [{"type": "web_search"}, {"type": "code_interpreter", "container": {"type": "auto"}}, MCP]
GET = {"type": "function", "name": "get", "description": "Gets.", "parameters": SCHEMA, "strict": False}
BARE = {"type": "function", "name": "ping"}

Scenario = Callable[[Server], Awaitable[None]]


# --------------------------------------------------------------------------- Chat Completions


async def chat(server: Server) -> None:
    for stream in STREAMED:
        await _chat_texts(server, stream)
        await _chat_calls(server, stream)
        server.play(SEARCH, OPEN, FIND, CODE, ECHO, FAILED, CITED)
        await server.post(CHAT, messages=CHAT_HI, tools=SERVER_TOOLS, stream=stream)
        server.play(BROKEN)
        await server.post(CHAT, 200 if stream else 503, messages=CHAT_HI, stream=stream)


async def _chat_texts(server: Server, stream: bool) -> None:
    ask: dict[str, Any] = {"messages": CHAT_HI, "stream": stream}
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if stream else {}
    server.play(HELLO, num_cached_tokens=4)
    await server.post(CHAT, **ask)
    await server.post(CHAT, **ask, n=3, **usage)
    await server.post(CHAT, **ask, include_reasoning=False, max_tokens=30)
    await server.post(CHAT, **ask, stop=["there"])
    await server.post(CHAT, **ask, logprobs=True, top_logprobs=2)
    await server.post(CHAT, **ask, return_token_ids=True)
    server.play(f"{THINK}{FINAL}Half")
    await server.post(CHAT, **ask)
    server.play(JSON)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    await server.post(CHAT, **ask, response_format=form)
    await server.post(CHAT, **ask, response_format={"type": "json_object"})


async def _chat_calls(server: Server, stream: bool) -> None:
    ask: dict[str, Any] = {"messages": CHAT_HI, "stream": stream}
    get = {"type": "function", "function": {"name": "get", "parameters": SCHEMA}}
    note = {"type": "custom", "custom": {"name": "note"}}
    server.play(THINK + PREAMBLE + "I look." + NEXT + call("get", '{"n":1}') + CALL)
    await server.post(CHAT, **ask, tools=[get], parallel_tool_calls=False)
    await server.post(CHAT, **ask, functions=[get["function"]])
    server.play(call("get", '{"n":1}') + NEXT + call("get", '{"n":2}') + CALL)
    await server.post(CHAT, **ask, tools=[get])
    server.play(call("note", '{"input":"text"}') + CALL)
    await server.post(CHAT, **ask, tools=[note])


async def chat_stored(server: Server) -> None:
    messages = [*CHAT_HI, {"role": "assistant", "content": None, "refusal": "No."}, *CHAT_HI]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    server.play(HELLO)
    await server.get(CHAT)
    made = await server.post(CHAT, messages=messages, store=True, metadata={"a": "b"}, seed=1)
    await server.post(CHAT, messages=parts, store=True, stream=True)
    one = f"{CHAT}/{made['id']}"
    await server.get(CHAT)
    await server.get(one)
    await server.get(f"{one}/messages")
    await server.bare(one, metadata={"c": "d"})
    await server.delete(one)
    await server.get(one, 404)


# --------------------------------------------------------------------------- Completions


async def completions(server: Server) -> None:
    for stream in STREAMED:
        ask: dict[str, Any] = {"stream": stream}
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        server.play(Script(load_vocabulary().encode(" world"), with_logprobs=True))
        for fields in (
            {"prompt": "hello"},
            {"prompt": ["a", "b"], "n": 2, **usage},
            {"prompt": "hello", "echo": True, "logprobs": 2, "return_token_ids": True},
            {"prompt": [1, 2, 3], "stop": ["o"]},
        ):
            await server.post("/v1/completions", **ask, **fields)
        server.play(BROKEN)
        await server.post("/v1/completions", 200 if stream else 503, prompt="hello", **ask)


# --------------------------------------------------------------------------- Responses


async def responses_text(server: Server) -> None:
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for stream in STREAMED:
        ask: dict[str, Any] = {"input": "hi", "stream": stream}
        server.play(HELLO, num_cached_tokens=4)
        await server.post(RESPONSES, **ask)
        await server.post(RESPONSES, **ask, include=["reasoning.encrypted_content"], store=False)
        await server.post(RESPONSES, **ask, **logprobs)
        await server.post(RESPONSES, **ask, include_reasoning=False, stop=["there"], user="u")
        await server.post(
            RESPONSES, **ask, reasoning={"effort": "low", "summary": "auto"}, instructions="Be kind."
        )
        if stream:
            await server.post(RESPONSES, **ask, stream_options={"include_obfuscation": True})
        server.play(JSON)
        await server.post(RESPONSES, **ask, text={"format": form, "verbosity": "low"})
        await server.post(RESPONSES, **ask, text={"format": {"type": "json_object"}})
        for text in (f"{ANALYSIS}Half", f"{THINK}{FINAL}Half", THINK + call("get", '{"n":')):
            server.play(text)
            await server.post(RESPONSES, **ask, tools=[GET], max_output_tokens=100)
        server.play(BROKEN)
        await server.post(RESPONSES, 200 if stream else 503, **ask)


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
        server.play(THINK + written + CALL)
        await server.post(RESPONSES, input="hi", tools=[declared], stream=stream)
    functions = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get"}]}
    for choice in ("none", "required", {"type": "function", "name": "get"}, functions):
        server.play(THINK + call("get", '{"n":1}') + CALL)
        await server.post(
            RESPONSES, input="hi", tools=[GET, BARE], tool_choice=choice, parallel_tool_calls=False
        )


async def responses_server_tools(server: Server) -> None:
    include = [
        "web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs",
        "reasoning.encrypted_content",
    ]  # fmt: skip
    for stream, included in itertools.product(STREAMED, (None, include)):
        ask: dict[str, Any] = {"input": "hi", "stream": stream}
        ask |= {} if included is None else {"include": included}
        server.play(SEARCH, OPEN, FIND, CODE, ECHO, FAILED, CITED)
        await server.post(RESPONSES, **ask, tools=SERVER_TOOLS)
        server.play(CODE.removesuffix(CALL))
        await server.post(RESPONSES, **ask, tools=SERVER_TOOLS)
        dead = {**MCP, "server_label": "dead"}
        server.play(HELLO)
        await server.post(RESPONSES, **ask, tools=[dead])
        server.play(ECHO)
        asking = {key: value for key, value in MCP.items() if key != "require_approval"}
        await server.post(RESPONSES, **ask, tools=[asking])
    request = (await server.post(RESPONSES, input="hi", tools=[asking]))["output"][-1]
    answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    server.play(CITED)
    for approve, reason in ((True, None), (False, "no")):
        told = {**answer, "approve": approve, **({"reason": reason} if reason else {})}
        body = await server.post(RESPONSES, input=[request, told], tools=[asking])
        await server.get(f"{RESPONSES}/{body['id']}/input_items")


async def responses_background(server: Server) -> None:
    server.play(HELLO)
    for stream in STREAMED:
        made = await server.post(RESPONSES, input="hi", background=True, stream=stream)
        response_id = made[0]["response"]["id"] if stream else made["id"]
        await server.ended(response_id)
        await server.get(f"{RESPONSES}/{response_id}?stream=true")
        await server.get(f"{RESPONSES}/{response_id}?stream=true&starting_after=3")
    server.play(BROKEN)
    await server.ended((await server.post(RESPONSES, input="hi", background=True))["id"])
    server.play(Script(BROKEN.token_ids, hang=True))
    made = await server.post(RESPONSES, input="hi", background=True)
    await server.bare(f"{RESPONSES}/{made['id']}/cancel")
    await server.ended(made["id"])
    await server.get(f"{RESPONSES}/{made['id']}?stream=true")
    await server.delete(f"{RESPONSES}/{made['id']}")


async def responses_compaction(server: Server) -> None:
    summary = f"{THINK}{FINAL}They said hi.{RETURN}"
    at = [{"type": "compaction", "compact_threshold": 20}]
    story = [{"role": "user", "content": "an old story"}, {"role": "assistant", "content": "Nice."}]
    for stream in STREAMED:
        server.play(summary, HELLO)
        ask = [*story, {"role": "user", "content": "and now?"}]
        await server.post(RESPONSES, input=ask, context_management=at, stream=stream)
        server.play(summary)
        await server.post(RESPONSES, input=[*story, {"type": "compaction_trigger"}], stream=stream)
    compacted = await server.post(f"{RESPONSES}/compact", input=story)
    body = await server.post(RESPONSES, input=[*compacted["output"], *CHAT_HI])
    await server.get(f"{RESPONSES}/{body['id']}/input_items")
    await server.bare(f"{RESPONSES}/input_tokens", input="hi")


SHELL_OUTPUT = {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
TIMED_OUT = {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}}
# Every kind of item that may come in, in the shortest form that is accepted.
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
    server.play(HELLO)
    body = await server.post(RESPONSES, input=list(ITEMS))
    listed = f"{RESPONSES}/{body['id']}/input_items"
    await server.get(f"{listed}?limit=100")
    again = await server.post(RESPONSES, input="more", previous_response_id=body["id"])
    await server.get(f"{RESPONSES}/{again['id']}")
    replayed = [*body["output"], *CHAT_HI, {"type": "item_reference", "id": body["output"][-1]["id"]}]
    last = await server.post(RESPONSES, input=replayed)
    await server.get(f"{RESPONSES}/{last['id']}/input_items")
    await server.get(f"{listed}?order=asc&limit=1")
    file = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk="}
    body = await server.post(RESPONSES, input=[{"role": "user", "content": [file]}])
    await server.get(f"{RESPONSES}/{body['id']}/input_items")


async def conversations(server: Server) -> None:
    server.play(HELLO)
    made = await server.bare(CONVERSATIONS, metadata={"a": "b"})
    one = f"{CONVERSATIONS}/{made['id']}"
    await server.get(f"{one}/items")
    for start in range(0, len(ITEMS), 20):
        await server.bare(f"{one}/items", items=list(ITEMS[start : start + 20]))
    for stream in STREAMED:
        await server.post(RESPONSES, input="hi", conversation=made["id"], stream=stream)
    listed = await server.get(f"{one}/items?limit=100")
    for item in listed["data"]:
        await server.get(f"{one}/items/{item['id']}")
    await server.delete(f"{one}/items/{listed['data'][0]['id']}")
    await server.get(one)
    await server.bare(one, metadata={})
    await server.delete(one)
    await server.bare(CONVERSATIONS)


# --------------------------------------------------------------------------- Messages


async def messages(server: Server) -> None:
    tools = [{"name": "get", "input_schema": SCHEMA}]
    thinking = {"type": "adaptive"}
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    for stream in STREAMED:
        ask: dict[str, Any] = {"messages": CHAT_HI, "max_tokens": 100, "stream": stream}
        server.play(HELLO, num_cached_tokens=4)
        await server.post(MESSAGES, **ask)
        await server.post(MESSAGES, **ask, thinking=thinking)
        await server.post(MESSAGES, **ask, thinking={"type": "adaptive", "display": "omitted"})
        await server.post(MESSAGES, **ask, stop_sequences=["there"])
        server.play(THINK + PREAMBLE + "I look." + NEXT + call("get", '{"n":1}') + CALL)
        await server.post(MESSAGES, **ask, tools=tools, thinking=thinking)
        server.play(call("get", '{"n":1}') + NEXT + call("get", "") + CALL)
        await server.post(MESSAGES, **ask, tools=tools)
        server.play(JSON)
        await server.post(MESSAGES, **ask, output_config=form)
        server.play(f"{THINK}{FINAL}Half")
        await server.post(MESSAGES, **ask)
        server.play(BROKEN)
        await server.post(MESSAGES, 200 if stream else 503, **ask)
    await server.post(f"{MESSAGES}/count_tokens", messages=CHAT_HI)


# --------------------------------------------------------------------------- the rest


async def models(server: Server) -> None:
    await server.get("/v1/models")
    await server.get("/v1/models/alias")


FAULTY: tuple[dict[str, Any], ...] = (
    {"temperature": 9}, {"nonsense": 1}, {"model": "gpt-9"}, {"max_tokens": -1}, {"tools": [{"type": "x"}]},
)  # fmt: skip


async def errors(server: Server) -> None:
    for path in (CHAT, "/v1/completions", RESPONSES, MESSAGES, f"{RESPONSES}/compact"):
        for fields in FAULTY:
            needs = {"messages": CHAT_HI, "max_tokens": 9} if path in (CHAT, MESSAGES) else {"input": "hi"}
            needs = {"prompt": "hi"} if path == "/v1/completions" else needs
            answer = await server.http.post(path, json={"model": MODEL, **needs, **fields})
            assert 400 <= answer.status_code < 500, (path, fields, answer.text)
        await server.http.post(path, content=b"{")
        await server.http.post(path, content=b"{}", headers={"content-type": "text/plain"})
        await server.http.put(path)
    for path in (f"{RESPONSES}/resp_0", f"{CONVERSATIONS}/conv_0", "/v1/nothing", "/v1/models/gpt-9"):
        await server.get(path, 404)
    server.client.max_in_flight = 0
    for path, fields in ((CHAT, {"messages": CHAT_HI}), (RESPONSES, {"input": "hi"})):
        await server.post(path, 429, **fields)
        await server.post(path, 429, stream=True, **fields)
    await server.post(MESSAGES, 429, messages=CHAT_HI, max_tokens=9)


async def unauthorized(server: Server) -> None:
    for path in (CHAT, RESPONSES, MESSAGES):
        await server.post(path, 401)
    headers = {"authorization": f"Bearer {KEY}"}
    assert (await server.http.get("/v1/models", headers=headers)).status_code == 200


ALL: tuple[Scenario, ...] = (
    chat, chat_stored, completions, responses_text, responses_client_tools, responses_server_tools,
    responses_background, responses_compaction, responses_items, conversations, messages, models, errors,
)  # fmt: skip
IN_DIALECTS = tuple(
    scenario for scenario in ALL if scenario.__name__.startswith(("responses", "conversations"))
)


async def record() -> Recorder:
    """Run all of them."""
    recorder = Recorder()
    for dialect in ("openai", "open-responses", "summary"):
        for scenario in ALL if dialect == "openai" else IN_DIALECTS:
            recorder.scenario = scenario.__name__
            async with served(recorder, dialect) as server:
                await scenario(server)
    for name in ("reasoning", "reasoning_content", "both"):
        recorder.scenario = f"chat with {name}"
        async with served(recorder, reasoning_field=name) as server:
            await chat(server)
    recorder.scenario = "unauthorized"
    async with served(recorder, keys=True) as server:
        await unauthorized(server)
    return recorder


__all__ = ["ALL", "DIALECT", "record"]
