"""Items and events of built-in tools, checked with the SDK's types; citations, replay and approvals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses.tool import CodeInterpreter

from tests.support.engine.scripted_client import Script
from tests.support.responses import fold_events
from tests.support.scripted_tools import CONTAINER, PAGE, ScriptedService, tools_served
from tests.support.server import VOCAB
from tests.turns.tools.test_loop import (
    CODE,
    ECHO,
    FINAL,
    MCP,
    PYTHON,
    SEARCH,
    THINK,
    WEB,
    failing,
    ids,
    kinds,
)

INCLUDE = ["web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs"]
CITED = "<|channel|>final<|message|>A is B.【0†L0】 Not 【9†L1】 nor 【x】, but【0†L0-L2】<|return|>"
LINK = " ([example.com](https://example.com/a)) "
CITED_TEXT = f"A is B.{LINK} Not 【9†L1】 nor 【x】, but{LINK}"


def types(events: list[dict[str, Any]]) -> list[str]:
    """Returns the types of events without their prefix, with consecutive deltas as one."""
    found: list[str] = []
    for event in events:
        name = event["type"].removeprefix("response.")
        if not (found and found[-1] == name and name.endswith("delta")):
            found.append(name)
    return found


def around(*inner: str) -> list[str]:
    """Returns the events of an item."""
    return ["output_item.added", *inner, "output_item.done"]


REASONING_EVENTS = around(
    "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"
)
WEB_EVENTS = around(*(f"web_search_call.{name}" for name in ("in_progress", "searching", "completed")))
CODE_EVENTS = around(
    "code_interpreter_call.in_progress", "code_interpreter_call_code.delta",
    "code_interpreter_call_code.done", "code_interpreter_call.interpreting",
    "code_interpreter_call.completed",
)  # fmt: skip
MCP_EVENTS = around(
    "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done", "mcp_call.completed"
)
LIST_EVENTS = around("mcp_list_tools.in_progress", "mcp_list_tools.completed")
MESSAGE_EVENTS = around("content_part.added", "output_text.delta", "output_text.done", "content_part.done")
AROUND = (["created", "in_progress"], ["completed"])


async def test_every_kind_streams_its_events_in_order() -> None:
    async with tools_served(THINK + SEARCH, PYTHON, ECHO, FINAL) as server:
        events = await server.events(input="x", tools=[WEB, CODE, MCP], include=INCLUDE)
        tools = [*WEB_EVENTS, *CODE_EVENTS, *MCP_EVENTS]
        middle = [*LIST_EVENTS, *REASONING_EVENTS, *tools, *MESSAGE_EVENTS]
        assert types(events) == [*AROUND[0], *middle, *AROUND[1]]
        streamed = fold_events(events)
        begun = events[0]["response"]
        assert (begun["status"], set(begun)) == ("in_progress", set(streamed))
        assert await server.ask("GET", f"/v1/responses/{streamed['id']}") == streamed


async def test_items_contain_the_tool_results_on_request() -> None:
    async with tools_served(SEARCH, PYTHON, ECHO, FINAL) as server:
        body = await server.respond(input="x", tools=[WEB, CODE, MCP], include=INCLUDE)
        listed, searched, computed, echoed, _ = body["output"]
        assert listed["tools"][0]["name"] == "echo"
        assert "error" not in listed
        source = {"type": "url", "url": PAGE.url}
        action = {"type": "search", "query": "q", "queries": ["q"], "sources": [source]}
        assert searched["action"] == action
        assert searched["results"][0]["title"] == PAGE.title
        assert (computed["container_id"], computed["code"]) == (CONTAINER, "print(6 * 7)")
        assert computed["outputs"] == [{"type": "logs", "logs": "42\n"}]
        assert (echoed["server_label"], echoed["name"], echoed["error"]) == ("srv", "echo", None)
        prefixes = [item["id"].split("_")[0] for item in body["output"]]
        assert prefixes == ["mcpl", "ws", "ci", "mcp", "msg"]
    async with tools_served(SEARCH, PYTHON, FINAL) as server:
        body = await server.respond(input="x", tools=[WEB, CODE])
        assert "sources" not in body["output"][0]["action"]
        assert "results" not in body["output"][0]
        assert body["output"][1]["outputs"] is None


async def test_code_is_streamed_and_calls_are_added_before_their_results() -> None:
    async with tools_served(SEARCH, PYTHON, FINAL) as server:
        events = await server.events(input="x", tools=[WEB, CODE])
        code = [e["delta"] for e in events if e["type"].endswith("call_code.delta")]
        assert len(code) > 3
        assert "".join(code) == "print(6 * 7)"
        added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
        assert added[0]["action"] == {"type": "search", "query": "q", "queries": ["q"]}
        assert added[0]["status"] == "in_progress"
        assert (added[1]["code"], added[1]["container_id"]) == ("", CONTAINER)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64])
async def test_citations_have_equal_indices_in_stream_and_body(step: int) -> None:
    script = Script(ids(CITED), tokens_per_step=step)
    async with tools_served(SEARCH, script) as server:
        events = await server.events(input="x", tools=[WEB])
        body = fold_events(events)
        part = body["output"][1]["content"][0]
        assert part["text"] == CITED_TEXT
        assert "".join(e["delta"] for e in events if e["type"].endswith("text.delta")) == CITED_TEXT
        for annotation in part["annotations"]:
            assert part["text"][annotation["start_index"] : annotation["end_index"]] == LINK
            assert (annotation["type"], annotation["url"]) == ("url_citation", PAGE.url)
            assert annotation["title"] == PAGE.title
        assert len(part["annotations"]) == 2
        shown = ""
        for event in events:
            if event["type"] == "response.output_text.delta":
                shown += event["delta"]
            elif event["type"] == "response.output_text.annotation.added":
                cited = event["annotation"]
                assert shown[cited["start_index"] : cited["end_index"]] == LINK, "text precedes annotations"


async def test_the_next_prompt_has_the_original_citation_marks() -> None:
    async with tools_served(SEARCH, CITED, FINAL) as server:
        body = await server.respond(input="x", tools=[WEB])
        more = [*body["output"], {"role": "user", "content": "more"}]
        await server.respond(input=more, tools=[WEB])
        assert "A is B.【0†L0】 Not" in server.prompt()
        assert "example.com/a)" not in server.prompt()


async def test_json_answers_keep_their_citation_marks() -> None:
    answer = '<|channel|>final<|message|>{"a":"x【0†L0】"}<|return|>'
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    async with tools_served(SEARCH, answer) as server:
        body = await server.respond(input="x", tools=[WEB], text={"format": form})
        part = body["output"][1]["content"][0]
        assert json.loads(part["text"]) == {"a": "x【0†L0】"}
        assert part["annotations"] == []


async def test_tool_failures_appear_as_events_and_statuses() -> None:
    tools = ScriptedService(failing("no network"))
    async with tools_served(SEARCH, PYTHON, ECHO, FINAL, tools=tools) as server:
        events = await server.events(input="x", tools=[WEB, CODE, MCP], include=INCLUDE)
        body = fold_events(events)
        assert body["status"] == "completed"
        assert [item.get("status") for item in body["output"]] == [None, *["failed"] * 3, "completed"]
        assert "response.mcp_call.failed" in [event["type"] for event in events]
        assert not any(e["type"].endswith("web_search_call.completed") for e in events)
        call = body["output"][3]
        assert call["output"] is None
        assert call["error"]["content"][0]["text"] == "no network"


async def test_an_unreachable_mcp_server_is_listed_with_its_error() -> None:
    tools = ScriptedService(broken={"srv": "connection refused"})
    async with tools_served(FINAL, tools=tools) as server:
        events = await server.events(input="x", tools=[MCP])
        body = fold_events(events)
        assert kinds(body) == ["mcp_list_tools", "message"]
        assert body["output"][0] | {"id": ""} == {
            "id": "",
            "type": "mcp_list_tools",
            "server_label": "srv",
            "tools": [],
            "error": "connection refused",
        }
        assert "response.mcp_list_tools.failed" in [event["type"] for event in events]
        assert body["status"] == "completed"


# --------------------------------------------------------------------------- replay


async def test_items_sent_back_are_replayed_with_their_stored_tokens() -> None:
    """Items with ids are replaced by their stored tokens, whether dumped with or without nulls."""
    for strip in (False, True):
        async with tools_served(THINK + SEARCH, PYTHON, ECHO, FINAL, FINAL) as server:
            tools = [WEB, CODE, MCP]
            body = await server.respond(input="x", tools=tools, include=INCLUDE)
            replayed = body["output"]
            if strip:
                replayed = [{k: v for k, v in item.items() if v is not None} for item in replayed]
            user = {"role": "user", "content": "x"}
            await server.respond(input=[user, *replayed, {"role": "user", "content": "y"}], tools=tools)
            third, last = server.prompt(3), server.prompt()
            calls = third[third.index("<|start|>assistant<|channel|>analysis to=browser") :]
            assert calls.removesuffix("<|start|>assistant") in last
            assert kinds(body).count("mcp_list_tools") == 1


async def test_items_of_another_server_are_rendered_from_their_fields() -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "web_search_call", "id": "ws_a", "action": {"type": "search", "query": "cats"}},
        {"type": "web_search_call", "action": {"type": "open_page", "url": "http://c"}, "results": None},
        {"type": "web_search_call", "action": {"type": "find_in_page", "pattern": "p", "url": "u"}},
        {"type": "web_search_call"},
        {"type": "code_interpreter_call", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]},
        {"type": "mcp_list_tools", "server_label": "s", "tools": []},
        {"type": "mcp_call", "server_label": "s", "name": "t", "arguments": "{}", "output": "fine"},
        {"type": "mcp_call", "server_label": "s", "name": "t", "arguments": "{}", "error": "bad"},
    ]
    async with tools_served(FINAL) as server:
        await server.respond(input=items, tools=[CODE])
        prompt = server.prompt()
        for text in (
            'to=browser.search<|channel|>analysis code<|message|>{"query":"cats"}<|call|>',
            'to=browser.open<|channel|>analysis code<|message|>{"id":"http://c"}<|call|>',
            'to=browser.find<|channel|>analysis code<|message|>{"pattern":"p"}<|call|>',
            'to=browser.search<|channel|>analysis code<|message|>{"query":""}<|call|>',
            "to=python<|channel|>analysis code<|message|>1+1<|call|>",
            "<|start|>python to=assistant<|channel|>analysis<|message|>2<|end|>",
            "<|start|>s.t to=assistant<|channel|>commentary<|message|>fine<|end|>",
            '<|start|>s.t to=assistant<|channel|>commentary<|message|>Error: "bad"<|end|>',
        ):
            assert text in prompt


# --------------------------------------------------------------------------- approvals


ASKING = {**MCP, "require_approval": "always"}


async def test_an_approval_request_ends_the_response_and_the_next_one_runs_the_call() -> None:
    async with tools_served(THINK + ECHO, FINAL) as server:
        events = await server.events(input="x", tools=[ASKING])
        first = fold_events(events)
        assert kinds(first) == ["mcp_list_tools", "reasoning", "mcp_approval_request"]
        assert first["status"] == "completed"
        assert server.tools.boxes[0].calls == []
        asked = first["output"][2]
        assert (asked["server_label"], asked["name"], asked["arguments"]) == ("srv", "echo", '{"text":"hi"}')
        answer = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": True}
        events = await server.events(input=[answer], previous_response_id=first["id"], tools=[ASKING])
        second = fold_events(events)
        assert types(events) == [*AROUND[0], *MCP_EVENTS, *MESSAGE_EVENTS, *AROUND[1]]
        assert kinds(second) == ["mcp_call", "message"]
        assert second["output"][0]["approval_request_id"] == asked["id"]
        assert second["output"][0]["output"] == 'echo: {"text":"hi"}'
        before, after = (request.prompt_token_ids for request in server.client.requests)
        reply = '<|start|>srv.echo to=assistant<|channel|>commentary<|message|>echo: {"text":"hi"}<|end|>'
        assert after == before + ids(THINK + ECHO + reply + "<|start|>assistant")
        assert second["usage"]["input_tokens"] == len(after)
        # The prompt of a third turn has the exchange once.
        await server.respond(
            input=[{"role": "user", "content": "y"}], previous_response_id=second["id"], tools=[ASKING]
        )
        assert server.prompt().count(reply) == 1
        assert len(server.tools.boxes[2].calls) == 0


async def test_approvals_work_without_a_store() -> None:
    async with tools_served(ECHO, FINAL) as server:
        first = await server.respond(input="x", tools=[ASKING], store=False)
        asked = first["output"][-1]
        answer = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": True}
        user = {"role": "user", "content": "x"}
        second = await server.respond(input=[user, *first["output"], answer], tools=[ASKING], store=False)
        assert kinds(second) == ["mcp_call", "message"]
        third = [user, *first["output"], answer, *second["output"], {"role": "user", "content": "y"}]
        last = await server.respond(input=third, tools=[ASKING], store=False)
        assert kinds(last) == ["message"], "an approval runs its call only once"
        assert server.prompt().count("echo: ") == 1


async def test_the_model_reads_a_refusal_with_its_reason() -> None:
    async with tools_served(ECHO, FINAL) as server:
        first = await server.respond(input="x", tools=[ASKING])
        answer = {
            "type": "mcp_approval_response",
            "approval_request_id": first["output"][-1]["id"],
            "approve": False,
            "reason": "Too early.",
        }
        second = await server.respond(input=[answer], previous_response_id=first["id"], tools=[ASKING])
        assert kinds(second) == ["message"]
        assert "The user did not approve this call. Too early.<|end|>" in server.prompt()


async def test_approvals_without_a_request_or_tool_and_second_ones_are_refused() -> None:
    async with tools_served(ECHO, FINAL) as server:
        first = await server.respond(input="x", tools=[ASKING])
        request_id = first["output"][-1]["id"]
        answer = {"type": "mcp_approval_response", "approval_request_id": request_id, "approve": True}
        unknown = {**answer, "approval_request_id": "mcpr_no"}
        for answers, tools in (
            ([unknown], [ASKING]),
            ([answer], [CODE]),
            ([answer], []),
            ([answer, answer], [ASKING]),
        ):
            status, body = await server.post(input=answers, previous_response_id=first["id"], tools=tools)
            path = f"input[{len(answers) - 1}].approval_request_id"
            assert (status, body["error"]["param"]) == (400, path)


# --------------------------------------------------------------------------- the SDK itself


async def test_the_sdk_streams_and_parses_built_in_tools() -> None:
    async with tools_served(THINK + SEARCH, PYTHON, ECHO, CITED) as server:
        tools: Any = [WEB, CODE, MCP]
        async with server.sdk.responses.stream(model="gpt-oss-test", input="x", tools=tools) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert final.output_text == CITED_TEXT
        assert [item.type for item in final.output] == [
            "mcp_list_tools",
            "reasoning",
            "web_search_call",
            "code_interpreter_call",
            "mcp_call",
            "message",
        ]
        stored = await server.sdk.responses.retrieve(final.id)
        assert stored.output_text == CITED_TEXT


async def test_tool_state_is_never_shown() -> None:
    async with tools_served(PYTHON, FINAL) as server:
        body = await server.respond(input="x", tools=[CODE])
        stored = await server.ask("GET", f"/v1/responses/{body['id']}")
        assert not any(key.startswith("_") for key in (*body, *stored))
        assert VOCAB.decode(server.client.requests[0].prompt_token_ids).count("num_calls") == 0


@pytest.mark.parametrize(
    "asked", [{}, {"container": None}, {"container": {"type": "auto", "memory_limit": "1g"}}]
)
async def test_a_code_interpreter_is_shown_with_a_container(asked: dict[str, Any]) -> None:
    """OpenAI's type requires a container, which requests to this server may omit."""
    async with tools_served(FINAL) as server:
        body = await server.respond(input="x", tools=[{"type": "code_interpreter", **asked}])
        (shown,) = body["tools"]
        assert shown["container"] == (asked.get("container") or {"type": "auto"})
        CodeInterpreter.model_validate(shown, strict=True)


async def test_secrets_are_neither_shown_nor_stored() -> None:
    async with tools_served(FINAL) as server:
        tool = {**MCP, "authorization": "sk-canary", "headers": {"X-Key": "sk-canary"}}
        body = await server.respond(input="x", tools=[tool])
        assert body["tools"][0]["headers"] == {"X-Key": "<redacted>"}
        stored = await server.http.get(f"/v1/responses/{body['id']}")
        assert "sk-canary" not in stored.text
        assert server.tools.boxes[0].wanted.mcp[0].authorization == "sk-canary"
