"""/v1/messages: blocks of requests and answers, streams equal to bodies, Anthropic's errors and SDK.

Tests import the SDK themselves: it takes a second, which every worker that collects this file would spend.
"""

from __future__ import annotations

import json
from pkgutil import resolve_name
from typing import Any

import httpx2
import pytest

from chorale.api.messages.request import HARMLESS, REFUSED, MessagesRequest
from chorale.api.reasoning_tokens import read_reasoning, write_reasoning
from chorale.errors import EngineDeadError
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.faces import fold_message
from tests.support.scripted import ANALYSIS, FINAL, NEXT, PREAMBLE, call, ids, in_rounds, playing
from tests.support.server import Server, served, with_server

ANSWER = ANALYSIS + "Think." + NEXT + FINAL + "Hello there.<|return|>"
CALLS = ANALYSIS + "Look." + NEXT + PREAMBLE + "One moment." + NEXT + call("f", '{"a": 1}') + "<|call|>"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"name": "f", "description": "F.", "input_schema": SCHEMA}]
THINKING = {"type": "adaptive"}
USER = [{"role": "user", "content": "hi"}]
COUNTS = ("input_tokens", "output_tokens", "cache_read_input_tokens")


async def post(server: Server, path: str = "/v1/messages", **fields: Any) -> httpx2.Response:
    body = {"model": "demo", "max_tokens": 1000, "messages": USER, **fields}
    return await server.http.post(path, json={k: v for k, v in body.items() if v is not None})


def events_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """Returns the events. Asserts that each has an ``event:`` line equal to its type."""
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")
    assert frames[-1] == ""
    found = []
    for frame in frames[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def both(server: Server, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    response = await post(server, **fields)
    assert response.status_code == 200, response.text
    return response.json(), fold_message(events_of(await post(server, stream=True, **fields)))


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in block.items() if k not in ("id", "partial")} for block in message["content"]]
    return {**message, "id": None, "content": content}


@pytest.mark.parametrize("script", [ANSWER, CALLS], ids=["answer", "call"])
@pytest.mark.parametrize("thinking", [None, THINKING, {**THINKING, "display": "omitted"}], ids=str)
def test_a_stream_folds_to_the_body(script: str, thinking: Any) -> None:
    body, streamed = with_server(playing(script), lambda s: both(s, tools=TOOLS, thinking=thinking))
    assert without_ids(body) == without_ids(streamed)
    kinds = [block["type"] for block in body["content"]]
    assert ("thinking" in kinds) == (thinking is not None)


def test_the_body_of_an_answer() -> None:
    import anthropic

    client = playing(ANSWER, num_cached_tokens=16)
    body = with_server(client, lambda s: post(s, thinking=THINKING)).json()
    anthropic.types.Message.model_validate(body)
    thought, text = body["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Think.")
    assert thought["signature"]
    assert (text["type"], text["text"]) == ("text", "Hello there.")
    assert (body["stop_reason"], body["stop_sequence"], body["model"]) == ("end_turn", None, "demo")
    assert body["id"].startswith("msg_")
    prompt = len(client.requests[0].prompt_token_ids)
    assert [body["usage"][key] for key in COUNTS] == [prompt - 16, len(ids(ANSWER)), 16]
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": 2}


@pytest.mark.parametrize(("display", "shown"), [("summarized", "Look."), ("omitted", "")])
async def test_a_call_and_its_result_are_rendered_in_the_next_prompt(display: str, shown: str) -> None:
    """Omitted thinking is read from its signature."""
    async with served(in_rounds(CALLS, ANSWER)) as server:
        asked = {"tools": TOOLS, "thinking": {**THINKING, "display": display}}
        first = (await post(server, **asked)).json()
        thought, text, use = first["content"]
        assert thought["thinking"] == shown
        assert (text["text"], first["stop_reason"]) == ("One moment.", "tool_use")
        assert (use["name"], use["input"]) == ("f", {"a": 1})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "42", "is_error": False}
        more = {"type": "text", "text": "go on"}
        messages = [
            *USER,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result, more]},
        ]
        answer = (await post(server, **asked, messages=messages)).json()
        assert answer["content"][-1]["text"] == "Hello there."
        prompt = server.prompt()
    assert "<|channel|>analysis<|message|>Look.<|end|>" in prompt
    assert "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>" in prompt
    assert "<|start|>functions.f to=assistant<|channel|>commentary<|message|>42<|end|>" in prompt
    assert prompt.endswith("<|start|>user<|message|>go on<|end|><|start|>assistant")


def test_a_forged_signature_yields_no_tokens() -> None:
    assert read_reasoning(write_reasoning(ids("abc"))) == tuple(ids("abc"))
    for bad in (write_reasoning([200006]), write_reasoning([1 << 40]), "cho1.@@", "cho1.gA==", "other", ""):
        assert read_reasoning(bad) == ()


async def test_the_stop_reason_tells_stop_sequences_and_limits() -> None:
    async with served(playing(ANSWER)) as server:
        body, streamed = await both(server, stop_sequences=["there"])
        assert without_ids(body) == without_ids(streamed)
        assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "there")
        assert body["content"][-1]["text"] == "Hello "
        body, _ = await both(server, stop_sequences=["there"], min_tokens=50, max_tokens=100)
        assert (body["stop_reason"], body["content"][-1]["text"]) == ("end_turn", "Hello there.")
    async with served(playing(call("f", '{"a":'))) as server:
        cut = (await post(server, tools=TOOLS)).json()
        assert (cut["stop_reason"], cut["content"][0]["input"]) == ("max_tokens", {})


async def test_a_thinking_budget_limits_the_reasoning() -> None:
    async with served(playing(ANSWER)) as server:
        assert (await post(server, thinking={"type": "enabled", "budget_tokens": 1024})).status_code == 200
        assert "{0,1024}" in (server.client.requests[0].sampling.grammar or "")


async def test_an_assistant_message_can_be_continued() -> None:
    async with served(playing(" 42.<|return|>")) as server:
        messages = [*USER, {"role": "assistant", "content": "The answer is"}]
        body = (await post(server, messages=messages, tools=TOOLS)).json()
        assert body["content"] == [{"type": "text", "text": " 42."}]
        assert server.prompt().endswith("<|start|>assistant<|channel|>final<|message|>The answer is")
        response = await post(server, messages=messages, thinking={"type": "enabled", "budget_tokens": 2000})
        assert response.status_code == 400


@pytest.mark.parametrize("display", ["summarized", "omitted"])
async def test_truncated_thinking_continues_from_its_exact_tokens(display: str) -> None:
    half = [*ids(ANALYSIS), *ids("Thi"), *ids("nk")]  # not the encoding of the text "Think"
    assert half != ids(ANALYSIS + "Think")
    rest = ids(NEXT + FINAL + "Hello there.<|return|>")
    count = iter([half, rest])
    async with served(ScriptedClient(lambda request, index: Script(next(count)))) as server:
        thinking = {**THINKING, "display": display}
        cut = (await post(server, max_tokens=5, thinking=thinking)).json()
        assert cut["stop_reason"] == "max_tokens"
        messages = [*USER, {"role": "assistant", "content": cut["content"]}]
        body = (await post(server, messages=messages, thinking=thinking)).json()
        first, second = (request.prompt_token_ids for request in server.client.requests)
        assert second == [*first, *half]
        assert body["content"][-1]["text"] == "Hello there."


@pytest.mark.parametrize(
    "blocks",
    [
        [],
        [{"type": "redacted_thinking", "data": "x"}],
        [{"type": "thinking", "thinking": "", "signature": "of another server"}],
    ],
)
async def test_an_empty_assistant_message_is_not_continued(blocks: list[Any]) -> None:
    async with served(playing(ANSWER)) as server:
        silent = {"role": "assistant", "content": blocks}
        for messages in ([silent], [*USER, silent]):
            body = (await post(server, messages=messages)).json()
            assert body["content"] == [{"type": "text", "text": "Hello there."}]
            assert server.prompt().endswith("<|end|><|start|>assistant")
            counted = await post(server, "/v1/messages/count_tokens", max_tokens=None, messages=messages)
            assert counted.json() == {"input_tokens": len(server.client.requests[-1].prompt_token_ids)}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ("no JSON", {}),
        ("[1]", {}),
        ("", {}),
        ('{"\\ud800": "\\udc00"}', {"\ufffd": "\ufffd"}),
        *[('{"a": ' + "[" * n + "]" * n + "}", {}) for n in (48, 900, *range(960, 990), 5000)],
    ],
)
async def test_calls_without_a_grammar_are_sent_whole(written: str, expected: Any) -> None:
    """A continued answer has no grammar, so a call may contain anything."""
    async with served(playing("<|end|><|start|>assistant" + call("f", written) + "<|call|>")) as server:
        messages = [*USER, {"role": "assistant", "content": "Let me see."}]
        body, streamed = await both(server, messages=messages, tools=TOOLS)
        assert not server.client.requests[0].sampling.grammar
        assert without_ids(body) == without_ids(streamed)
        assert body["content"][-1]["input"] == expected


async def test_system_blocks_documents_and_search_results_become_text() -> None:
    async with served(playing(ANSWER)) as server:
        document = {
            "type": "document",
            "title": "Notes",
            "source": {"type": "text", "media_type": "text/plain", "data": "Buy milk."},
        }
        found = {
            "type": "search_result",
            "source": "http://x",
            "title": "X",
            "content": [{"type": "text", "text": "Y"}],
        }
        system = [
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ]
        messages = [{"role": "user", "content": [document, found, {"type": "text", "text": "Well?"}]}]
        response = await post(server, system=system, messages=messages)
        assert response.status_code == 200, response.text
        prompt = server.prompt()
    assert "# Instructions\n\nBe brief.\n\nBe kind.<|end|>" in prompt
    assert "<|message|>Notes\n\nBuy milk.\n\nX\n\nhttp://x\n\nY\n\nWell?<|end|>" in prompt


async def test_count_tokens_returns_the_length_of_the_prompt() -> None:
    async with served(playing(ANSWER)) as server:
        fields = {"tools": TOOLS, "system": "Be brief.", "thinking": THINKING}
        counted = await post(server, "/v1/messages/count_tokens", max_tokens=None, **fields)
        await post(server, **fields)
        assert counted.json() == {"input_tokens": len(server.client.requests[0].prompt_token_ids)}
        whole = await post(server, "/v1/messages/count_tokens", stream=True, **fields)
        assert whole.json() == counted.json()


async def test_tools_that_anthropic_defines_are_declared() -> None:
    async with served(playing(ANSWER)) as server:
        tools = [
            {"type": "bash_20250124", "name": "bash"},
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
            {"type": "memory_20250818", "name": "memory"},
            {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
            {"type": "custom", "name": "f", "input_schema": SCHEMA, "defer_loading": True},
        ]
        assert (await post(server, tools=tools)).status_code == 200
        for name in ("bash", "str_replace_based_edit_tool", "memory", "f"):
            assert f"type {name} = (_: {{" in server.prompt()
        assert "tool_search" not in server.prompt()


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": [{"role": "user", "content": [PDF]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
         "tool_use_id"),
        ({"messages": [*USER, {"role": "assistant", "content": [USE]}]}, "tool_result"),
        ({"messages": [*USER, {"role": "assistant", "content": [{**USE, "type": "server_tool_use"}]}]},
         "server_tool_use"),
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [*TOOLS, *TOOLS]}, "twice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "perhaps"}}, "thinking"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"speed": "fast"}, "speed"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"stop": ["x"]}, "stop"),
        ({"max_tokenz": 5}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
async def test_refusals_have_anthropics_form(fields: dict[str, Any], word: str) -> None:
    async with served(playing(ANSWER), unknown_fields="refuse") as server:
        for stream in (False, True):
            response = await post(server, stream=stream, **fields)
            assert response.status_code == 400, response.text
            body = response.json()
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
            assert word in body["error"]["message"]
            assert body["request_id"] == response.headers["request-id"]


async def test_other_errors_have_their_types() -> None:
    async with served(playing(ANSWER)) as server:
        missing = await post(server, model="claude")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        wrong = await server.http.get("/v1/messages")
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
        text = await server.http.post(
            "/v1/messages", content=b"{", headers={"content-type": "application/json"}
        )
        assert text.json()["error"]["type"] == "invalid_request_error"
        server.client.max_in_flight = 0
        full = await post(server)
        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert full.headers["retry-after"] == "1"


async def test_an_error_within_a_stream_is_its_last_event() -> None:
    async with served(playing(FINAL + "partial", error=EngineDeadError("gone"))) as server:
        events = events_of(await post(server, stream=True))
        dead = await post(server)
    assert (dead.status_code, dead.json()["error"]["type"]) == (503, "overloaded_error")
    assert events[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
    assert events[-2]["type"] == "content_block_stop"


# --------------------------------------------------------------------------- the SDK


def sdk(server: Server) -> Any:
    import anthropic

    return anthropic.AsyncAnthropic(
        api_key="k", base_url="http://server", http_client=server.http, max_retries=0
    )


async def test_the_sdk_reads_bodies_streams_counts_and_errors() -> None:
    import anthropic

    async with served(playing(CALLS)) as server:
        client, asked = sdk(server), {"model": "demo", "messages": USER, "tools": TOOLS}
        body = await client.messages.create(max_tokens=100, **asked)  # type: ignore[call-overload]
        assert body.stop_reason == "tool_use"
        assert body.content[-1].input == {"a": 1}
        assert body._request_id
        async with client.messages.stream(max_tokens=100, thinking=THINKING, **asked) as stream:  # type: ignore[arg-type]
            kinds = {event.type async for event in stream}
            final = await stream.get_final_message()
        assert {"thinking", "text", "input_json", "signature", "message_stop"} <= kinds
        assert final.content[-1].type == "tool_use"
        assert final.content[-1].input == {"a": 1}
        assert final.usage.output_tokens == body.usage.output_tokens
        counted = await client.messages.count_tokens(**asked)  # type: ignore[arg-type]
        assert counted.input_tokens == body.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(max_tokens=5, model="claude", messages=USER)  # type: ignore[arg-type]
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.messages.create(max_tokens=0, model="demo", messages=USER)  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["anthropic.types", "anthropic.types.beta"])
@pytest.mark.parametrize(
    "sent",
    ["message_create_params:MessageCreateParamsBase", "message_count_tokens_params:MessageCountTokensParams"],
)
def test_no_field_of_the_sdk_is_unknown(package: str, sent: str) -> None:
    fields = resolve_name(f"{package}.{sent}").__annotations__
    assert set(fields) <= {*MessagesRequest.model_fields, *HARMLESS, *REFUSED}


async def test_the_sdks_tool_runner_continues_without_a_thread() -> None:
    import anthropic

    @anthropic.beta_async_tool
    async def f(a: int) -> str:
        """F."""
        return str(a + 1)

    async with served(in_rounds(CALLS, ANSWER)) as server:
        refused = await post(server, thread={"type": "create"})
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert (refused.status_code, refused.json()["error"]["details"]) == (400, details)
        runner = sdk(server).beta.messages.tool_runner(
            model="demo",
            max_tokens=100,
            messages=USER,  # type: ignore[arg-type]
            tools=[f],
        )
        kinds = [message.content[-1].type async for message in runner]
        assert kinds == ["tool_use", "text"]


async def test_a_request_of_claude_code_is_answered() -> None:
    """Cache marks on blocks and tools, a large budget, labels, a beta field, many tools."""
    mark = {"cache_control": {"type": "ephemeral"}}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"file_path": {"type": "string", "format": "path-like"}},
    }
    tools: list[dict[str, Any]] = [
        {"name": name, "description": "...", "input_schema": schema}
        for name in ("Read", "Edit", "Bash", "TodoWrite", "Grep")
    ]
    fields = {
        "system": [{"type": "text", "text": "You are a coding agent.", **mark}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "fix it", **mark}]}],
        "tools": [*tools[:-1], {**tools[-1], **mark}],
        "metadata": {"user_id": "u"},
        "max_tokens": 32000,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "temperature": 1,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
    }
    script = ANALYSIS + "I read." + NEXT + call("Read", '{"file_path":"a.py"}') + "<|call|>"
    async with served(playing(script)) as server:
        headers = {
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "interleaved-thinking-2025-05-14",
            "x-api-key": "k",
        }
        response = await server.http.post(
            "/v1/messages?beta=true", json={"model": "demo", **fields}, headers=headers
        )
        assert response.headers["request-id"] == response.headers["x-request-id"]
        message = fold_message(events_of(response))
        assert [block["type"] for block in message["content"]] == ["thinking", "tool_use"]
        assert message["stop_reason"] == "tool_use"
