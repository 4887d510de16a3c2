"""The loop: rounds, prompts to the token, limits, errors that the model reads, and what ends a turn."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from chorale.client.base import EngineStatus
from chorale.errors import EngineDeadError
from chorale.requests.built_in_tools import read_mcp
from chorale.tools.contract import CodeOutput, Progress, ToolCall, ToolResult
from chorale.turns.choice.runaway import MAX_SAME_RESULTS
from chorale.turns.choice.tool_use import MAX_UNKNOWN
from tests.support.engine.scripted_client import Script, ids
from tests.support.event_loop import until
from tests.support.responses import TOOL
from tests.support.scripted_tools import Runner, ScriptedService, result, tools_served

THINK = "<|channel|>analysis<|message|>I need a tool.<|end|><|start|>assistant"
SEARCH = '<|channel|>analysis to=browser.search code<|message|>{"query":"q"}<|call|>'
PYTHON = "<|channel|>analysis to=python code<|message|>print(6 * 7)<|call|>"
ECHO = '<|channel|>commentary to=srv.echo <|constrain|>json<|message|>{"text":"hi"}<|call|>'
FORCED = "It is 42.<|return|>"  # behind a header that is in the prompt
FINAL = "<|channel|>final<|message|>It is 42.<|return|>"
RESULT = "<|start|>python to=assistant<|channel|>analysis<|message|>42\n<|end|><|start|>assistant"
CODE: dict[str, Any] = {"type": "code_interpreter", "container": {"type": "auto"}}
WEB: dict[str, Any] = {"type": "web_search"}
MCP: dict[str, Any] = {
    "type": "mcp",
    "server_label": "srv",
    "server_url": "http://127.0.0.1:1/mcp",
    "require_approval": "never",
}


def kinds(body: Any) -> list[str]:
    return [item["type"] for item in body["output"]]


async def test_the_next_round_has_the_exact_tokens_of_call_and_result() -> None:
    async with tools_served(THINK + PYTHON, THINK + FINAL) as server:
        body = await server.respond(input="6 * 7?", tools=[CODE])
        assert kinds(body) == ["reasoning", "code_interpreter_call", "reasoning", "message"]
        assert body["status"] == "completed"
        assert body["output"][1]["code"] == "print(6 * 7)"
        first, second = (request.prompt_token_ids for request in server.client.requests)
        assert second == first + ids(THINK + PYTHON + RESULT)
        assert "## python" in server.prompt(0)
        assert "## browser" not in server.prompt(0)


async def test_usage_is_summed_and_repeated_tokens_count_as_cached() -> None:
    """Whatever the engine found of them: it had computed all of it for this turn."""
    first_round = Script(ids(THINK + PYTHON), num_cached_tokens=5)
    async with tools_served(first_round, Script(ids(THINK + FINAL), num_cached_tokens=16)) as server:
        usage = (await server.respond(input="6 * 7?", tools=[CODE]))["usage"]
        first, second = (request.prompt_token_ids for request in server.client.requests)
        written = len(ids(THINK + PYTHON))
        assert usage["input_tokens"] == len(first) + len(second)
        assert usage["input_tokens_details"]["cached_tokens"] == 5 + len(first) + written
        assert usage["output_tokens"] == written + len(ids(THINK + FINAL))
        assert usage["output_tokens_details"]["reasoning_tokens"] == 2 * len(ids("I need a tool."))
        assert usage["output_tokens_details"]["tool_output_tokens"] == len(ids(RESULT))


async def test_max_output_tokens_limits_the_whole_turn() -> None:
    async with tools_served(THINK + PYTHON, FINAL) as server:
        written = len(ids(THINK + PYTHON))
        await server.respond(input="x", tools=[CODE], max_output_tokens=written + 5)
        assert server.client.requests[1].sampling.max_tokens == 5

    async with tools_served(THINK + PYTHON, FINAL) as server:
        body = await server.respond(input="x", tools=[CODE], max_output_tokens=written)
        assert body["status"] == "incomplete"
        assert body["output"][1]["status"] == "incomplete"
        assert len(server.client.requests) == 1
        assert server.tools.boxes[0].calls == []


async def test_reasoning_after_a_tool_is_bounded_by_the_remaining_tokens() -> None:
    """Else reasoning could use up the tokens of an answer that the format demands."""
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    written = len(ids(THINK + PYTHON))

    def bounds(grammar: str) -> list[str]:
        return re.findall(r"\{0,(\d+)\}", json.loads(grammar)["grammars"][0]["lark_grammar"])

    async with tools_served(THINK + PYTHON, FINAL) as server:
        await server.respond(input="x", tools=[CODE], text=form, max_output_tokens=written + 100)
        first, second = (bounds(request.sampling.grammar) for request in server.client.requests)
    async with tools_served(FINAL) as server:
        await server.respond(input="x", tools=[CODE], text=form, max_output_tokens=100)
        assert second == bounds(server.client.requests[0].sampling.grammar)
        assert first != second


@pytest.mark.parametrize(
    ("tool", "written"),
    [
        ("python", "print("), ("browser.search", ""), ("browser.open", ""), ("browser.find", ""),
        ("browser.search", "[" * 5000), ("browser.open", '{"id":' * 5000), ("browser.open", "9" * 9000),
        ("browser.find", '{"query": "\\ud83d'), ("browser.search", '{"query": "\\ud83d"}'),
    ],
)  # fmt: skip
async def test_a_truncated_call_does_not_run_and_can_be_sent_back(tool: str, written: str) -> None:
    script = f"<|channel|>analysis to={tool} code<|message|>{written}"
    tools = [CODE, WEB]
    async with tools_served(script, script, FINAL) as server:
        body = await server.respond(input="x", tools=tools)
        assert (body["status"], body["output"][0]["status"]) == ("incomplete", "incomplete")
        assert server.tools.boxes[0].calls == []
        assert b'"response.incomplete"' in await server.stream(input="x", tools=tools)
        again = await server.respond(input=[*body["output"], {"role": "user", "content": "x"}], tools=tools)
        assert again["status"] == "completed"


async def test_a_call_without_its_stop_token_runs() -> None:
    """<|end|> or a new message ends it too; what the engine goes on to write is not read."""

    text = PYTHON.replace("<|call|>", "<|end|><|start|>assistant<|channel|>final<|message|>Made up.")
    async with tools_served(Script(ids(text), hang=True), FINAL) as server:
        body = await server.respond(input="x", tools=[CODE])
        assert [item["type"] for item in body["output"]] == ["code_interpreter_call", "message"]
        assert body["output"][1]["content"][0]["text"] == "It is 42."
        assert server.client.aborted == [server.client.requests[0].request_id]
        assert server.prompt().endswith(PYTHON + RESULT)


@pytest.mark.parametrize("limit", [0, 2])
async def test_max_tool_calls_ends_the_calls_not_the_turn(limit: int) -> None:
    async with tools_served(*[PYTHON] * (limit + 1), FORCED) as server:
        body = await server.respond(input="x", tools=[CODE], max_tool_calls=limit)
        assert kinds(body) == ["code_interpreter_call"] * limit + ["reasoning", "message"]
        assert body["max_tool_calls"] == limit
        assert len(server.tools.boxes[0].calls) == limit
        *allowed, last, _ = (request.sampling.grammar for request in server.client.requests)
        assert not any(allowed)
        assert bool(last) == bool(limit)  # without any tool there is nothing to rule out
        assert "to=python" not in last  # it could not be called any more ...
        # ... and the script that did so all the same is made to answer.
        assert server.prompt().endswith("<|start|>assistant<|channel|>final<|message|>")


async def test_equal_calls_with_equal_results_are_bounded() -> None:
    """A model that asks for the same again and again is made to answer."""

    same = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
    async with tools_served(*[same] * MAX_SAME_RESULTS, FINAL) as server:
        body = await server.respond(input="x", tools=[CODE])
        assert len(server.tools.boxes[0].calls) == MAX_SAME_RESULTS
        assert body["status"] == "completed"
        last = server.client.requests[-1].sampling.grammar
        assert last
        assert "to=python" not in last
        assert "to=python" not in server.client.requests[-2].sampling.grammar


async def test_a_required_call_is_never_one_beyond_the_limit() -> None:
    """Otherwise the grammar asks for a call that is not run, and the turn ends as an engine's error."""

    call = f"<|channel|>commentary to=functions.{TOOL['name']} <|constrain|>json<|message|>{{}}<|call|>"
    async with tools_served(call) as server:
        await server.respond(input="x", tools=[CODE, TOOL], tool_choice="required", max_tool_calls=0)
        grammar = server.client.requests[0].sampling.grammar
        assert f"to=functions.{TOOL['name']}" in grammar
        assert "to=python" not in grammar
        only_built_in: list[Any] = ["required", {"type": "code_interpreter"}]
        for choice in only_built_in:
            status, body = await server.post(input="x", tools=[CODE], tool_choice=choice, max_tool_calls=0)
            assert (status, body["error"]["param"]) == (400, "max_tool_calls")


GHOST = '<|channel|>commentary to=container.exec <|constrain|>json<|message|>{"a":1}<|call|>'
SLIP = '<|channel|>analysis to=browser.type_text code<|message|>{"a":1}<|call|>'


@pytest.mark.parametrize(
    ("script", "channel", "name"),
    [(GHOST, "commentary", "container.exec"), (SLIP, "analysis", "browser.type_text")],
)
async def test_a_tool_that_does_not_exist_is_an_error_that_the_model_reads(
    script: str, channel: str, name: str
) -> None:
    said = f"Error: the tool {name} does not exist. You can call: browser.find"
    async with tools_served(script, FINAL) as server:
        body = await server.respond(input="x", tools=[WEB, TOOL])
        assert kinds(body) == ["reasoning", "message"]
        assert f" to=assistant<|channel|>{channel}<|message|>{said}" in server.prompt()
        assert "functions.get_weather.<|end|>" in server.prompt()


async def test_unknown_tools_are_bounded() -> None:
    async with tools_served(*[GHOST] * (MAX_UNKNOWN + 1), FORCED) as server:
        body = await server.respond(input="x", tools=[CODE])
        assert kinds(body)[-1] == "message"
        assert len(server.client.requests) == MAX_UNKNOWN + 2
        assert server.prompt().endswith("<|channel|>final<|message|>")


async def test_a_function_of_the_client_ends_the_turn_as_before() -> None:
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"a"}<|call|>'
    async with tools_served(PYTHON, call, FINAL) as server:
        first = await server.respond(input="x", tools=[CODE, TOOL])
        assert kinds(first) == ["code_interpreter_call", "function_call"]
        output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "warm"}
        second = await server.respond(input=[output], previous_response_id=first["id"], tools=[CODE, TOOL])
        assert kinds(second) == ["message"]
        prompts = [request.prompt_token_ids for request in server.client.requests]
        assert prompts[2][: len(prompts[1])] == prompts[1], "the exchange is replayed to the token"
        keys = [key for key, _ in server.tools.opened]
        assert keys[0] == keys[1], "one session a chain"
        assert server.tools.opened[1][1] == {"num_calls": 1}


async def test_tools_keep_their_state_in_a_conversation_a_chain_and_a_list() -> None:
    """One session and one history of cursors, also past a turn without tools; a branch has its own."""

    user = {"role": "user", "content": "x"}
    async with tools_served(PYTHON, FINAL, FINAL, PYTHON, FINAL, PYTHON, FINAL) as server:
        first = await server.respond(input=[user], tools=[CODE])
        second = await server.respond(input=[user], previous_response_id=first["id"])
        await server.respond(input=[user], previous_response_id=second["id"], tools=[CODE])
        await server.respond(input=[user, *first["output"], user], tools=[CODE])
        keys, states = zip(*server.tools.opened, strict=True)
        assert len(set(keys)) == 1
        assert states == (None, {"num_calls": 1}, {"num_calls": 1})
    async with tools_served(PYTHON, FINAL, PYTHON, FINAL) as server:
        made = (await server.http.post("/v1/conversations", json={})).json()
        for _ in range(2):
            await server.respond(input=[user], conversation=made["id"], tools=[CODE])
        keys, states = zip(*server.tools.opened, strict=True)
        assert len(set(keys)) == 1
        assert states == (None, {"num_calls": 1})


def failing(text: str) -> Runner:
    async def runner(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        yield result(call, text, failed=True)

    return runner


async def crashing(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
    yield CodeOutput("a")
    raise RuntimeError("a bug")


async def silent(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
    if call.recipient == "":
        yield CodeOutput("")


async def test_the_turn_continues_whatever_a_tool_does(caplog: Any) -> None:
    for runner, word in ((failing("no network"), "no network"), (crashing, "failed"), (silent, "failed")):
        async with tools_served(PYTHON, FINAL, tools=ScriptedService(runner)) as server:
            body = await server.respond(input="x", tools=[CODE])
            assert body["status"] == "completed"
            assert body["output"][0]["status"] == "failed"
            assert word in server.prompt()
            lines = server.state.metrics.render().decode().splitlines()
            [counted] = [line for line in lines if line.startswith("chorale:tool_calls_total{")]
            assert 'tool="python"' in counted
            assert 'status="failed"' in counted
            assert counted.endswith(" 1.0")

    assert "a bug" in caplog.text


async def test_a_long_result_is_cut_to_the_window() -> None:
    async def long(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        yield result(call, "é word " * 5000)

    async with tools_served(PYTHON, FINAL, tools=ScriptedService(long), max_model_len=1500) as server:
        body = await server.respond(input="x", tools=[CODE])
        assert body["status"] == "completed"
        prompt = server.client.requests[1].prompt_token_ids
        assert 1000 < len(prompt) <= 1500 - 1500 // 4
        assert "[cut here: the rest does not fit into the context window]<|end|>" in server.prompt()
        assert "\ufffd" not in server.prompt()
    async with tools_served(PYTHON, FINAL, tools=ScriptedService(long), max_model_len=330) as server:
        body = await server.respond(input="x", tools=[CODE])
        assert body["status"] == "incomplete"
        assert len(server.client.requests) == 1


async def test_a_client_that_leaves_ends_its_tool() -> None:
    started = asyncio.Event()

    async def hanging(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        yield CodeOutput("working")
        started.set()
        await asyncio.Event().wait()

    async with tools_served(PYTHON, tools=ScriptedService(hanging)) as server:
        for body in ({"stream": True}, {}):
            started.clear()
            request = asyncio.create_task(server.post(input="x", tools=[CODE], **body))
            await started.wait()
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await until(lambda: server.tools.boxes[-1].closed)
            assert server.tools.boxes[-1].aborted == ["python"]


async def test_choices_run_their_tools_side_by_side() -> None:
    """Chat with n: each choice has a box of its own, and one tool waits for no other."""
    both = asyncio.Event()
    running: set[str] = set()

    async def meeting(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        running.add(call.call_id)
        if len(running) == 2:
            both.set()
        await both.wait()
        yield result(call, "met")

    def source(request: Any, index: int) -> Script:
        first = len(request.prompt_token_ids) == len(server.client.requests[0].prompt_token_ids)
        if not first:
            return Script(ids(FINAL))
        return Script(ids(PYTHON if index < 2 else "<|channel|>final<|message|>At once.<|return|>"))

    async with tools_served(FINAL, tools=ScriptedService(meeting)) as server:
        server.client.source = source
        _, body = await server.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], tools=[CODE], n=3
        )
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert texts == ["It is 42.", "It is 42.", "At once."]
        assert len({key for key, _ in server.tools.opened}) == 3
        prompts = [len(request.prompt_token_ids) for request in server.client.requests]
        assert body["usage"]["prompt_tokens"] == sum(prompts), "the shared prompt counts once"


@pytest.mark.parametrize("num_tokens", range(6))
async def test_an_engine_that_dies_in_one_choice_is_the_error_of_all(num_tokens: int) -> None:
    """Whatever the others were about to say: their items are closed, or the fold would refuse their ends."""

    def source(request: Any, index: int) -> Script:
        number = request.request_id.split(".")[1:]
        if not number:
            return Script(ids(PYTHON))
        if number[0] == "0":
            return Script(ids("<|channel|>final<|message|>Here it ends")[:num_tokens], error=dead)
        return Script(ids(PYTHON if int(number[1]) < 9 else FINAL), tokens_per_step=4)

    dead = EngineDeadError("the engine is gone")
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": [CODE], "n": 4}
    async with tools_served(FINAL) as server:
        server.client.source = source
        status, body = await server.post("/v1/chat/completions", **asked)
        assert (status, body["error"]["message"]) == (503, "the engine is gone")
        streamed = await server.stream("/v1/chat/completions", store=True, **asked)
        assert b"the engine is gone" in streamed
        assert streamed.endswith(b"data: [DONE]\n\n")


async def test_preambles_and_reasoning_stay_between_calls() -> None:
    preamble = "<|channel|>commentary<|message|>Let me compute.<|end|><|start|>assistant"
    async with tools_served(THINK + preamble + PYTHON, THINK + PYTHON, FINAL) as server:
        body = await server.respond(input="x", tools=[CODE])
        assert kinds(body) == [
            "reasoning", "message", "code_interpreter_call", "reasoning", "code_interpreter_call",
            "message",
        ]  # fmt: skip
        assert server.prompt().count("I need a tool.") == 2
        assert "Let me compute." in server.prompt()
        # The next turn drops the reasoning before the answer, and keeps calls and results.
        await server.respond(
            input=[{"role": "user", "content": "and?"}], previous_response_id=body["id"], tools=[CODE]
        )
        assert server.prompt().count("I need a tool.") == 0
        assert server.prompt().count(PYTHON + RESULT.removesuffix("<|start|>assistant")) == 2


async def test_an_answer_is_forced_again_after_another_tool() -> None:
    """The last prompt has each token of the earlier rounds once; its grammar covers those of the last two."""
    only = "<|channel|>analysis<|message|>Hm.<|return|>"
    written = "I look.<|end|><|start|>assistant" + PYTHON
    async with tools_served(only, written, only, FORCED) as server:
        body = await server.respond(input="x", tools=[CODE], max_tool_calls=1)
        assert kinds(body)[-2:] == ["reasoning", "message"]
        assert body["output"][-1]["content"][0]["text"] == "It is 42."
        assert len(server.client.requests) == 4
        repeated = ids(only.replace("<|return|>", "<|end|><|start|>assistant<|channel|>final<|message|>"))
        assert server.prompt_ids(3) == [*server.prompt_ids(2), *repeated]
        assert server.client.requests[3].sampling.grammar_context == len(repeated)


async def test_a_turn_after_a_tool_waits_for_room_in_the_queue() -> None:
    """Others took it meanwhile: the turn tries for a while, then it is incomplete and keeps what it has."""

    filled = asyncio.Event()

    async def filling(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        server.client.max_in_flight = 0
        filled.set()
        yield result(call, "42")

    async with tools_served(PYTHON, FINAL, tools=ScriptedService(filling)) as server:
        request = asyncio.create_task(server.respond(input="x", tools=[CODE]))
        await filled.wait()
        await asyncio.sleep(0.15)
        assert not request.done()
        server.client.max_in_flight = 8
        assert (await request)["status"] == "completed"


async def test_a_queue_that_stays_full_ends_the_turn(monkeypatch: Any) -> None:
    monkeypatch.setattr("chorale.turns.run.QUEUE_PATIENCE", 0.05)

    async def filling(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        server.client.max_in_flight = 0
        yield result(call, "42")

    async with tools_served(PYTHON, FINAL, tools=ScriptedService(filling)) as server:
        body = await server.respond(input="x", tools=[CODE])
        assert body["status"] == "incomplete"
        assert kinds(body) == ["code_interpreter_call"]


async def test_an_engine_that_dies_between_rounds_fails_the_response() -> None:
    async def killing(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        server.client.status_value = EngineStatus("dead")
        yield result(call, "42")

    async with tools_served(PYTHON, FINAL, tools=ScriptedService(killing)) as server:
        events = (await server.stream(input="x", tools=[CODE])).decode()
        assert "event: response.failed" in events
        assert "event: error" in events


async def test_a_turn_above_the_threshold_is_summarized_between_tools() -> None:
    """``context_management``: what the tool gave is in the summary, and the turn goes on from that."""
    compaction = [{"type": "compaction", "compact_threshold": 400}]
    summary = "<|channel|>final<|message|>Python said 42, often.<|return|>"

    async def verbose(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        yield result(call, "42 " * 400)

    async with tools_served(PYTHON, summary, THINK + FINAL, tools=ScriptedService(verbose)) as server:
        body = await server.respond(input="6 * 7?", tools=[CODE], context_management=compaction)
        assert kinds(body) == ["code_interpreter_call", "compaction", "reasoning", "message"]
        asked, answered = server.prompt(1), server.prompt(2)
        assert asked.index("42 42 42") < asked.index("Summarize this")
        assert "42 42 42" not in answered
        assert "## python" in answered, "the tools are still there"
        assert answered.endswith(
            "Python said 42, often.<|end|><|start|>user<|message|>6 * 7?<|end|><|start|>assistant"
        )
        usage = body["usage"]
        prompts = [request.prompt_token_ids for request in server.client.requests]
        assert usage["input_tokens"] == sum(map(len, prompts))
        written = [PYTHON, summary, THINK + FINAL]
        assert usage["output_tokens"] == sum(len(ids(text)) for text in written)
        again = await server.respond(input="and?", tools=[CODE], previous_response_id=body["id"])
        assert "42 42 42" not in server.prompt()
        assert again["status"] == "completed"

    async with tools_served(
        PYTHON, summary, PYTHON, summary, FINAL, tools=ScriptedService(verbose)
    ) as server:
        body = await server.respond(input="6 * 7?", tools=[CODE], context_management=compaction)
        assert kinds(body) == ["code_interpreter_call", "compaction"] * 2 + ["message"]


@pytest.mark.parametrize(
    ("label", "here"),
    [
        ("code_interpreter", "python"),
        ("container", "python"),
        ("web_search_preview", "browser"),
        ("python", "python"),
        ("notes", "notes"),
    ],
)
def test_labels_of_vllm_mean_the_built_in_tools_unless_the_request_has_an_address(
    label: str, here: str
) -> None:
    tool = {"type": "mcp", "server_label": label}
    assert read_mcp(tool, "tools[0]", approvals=True).server_label == here
    addressed = {**tool, "server_url": "https://a.example/mcp"}
    assert read_mcp(addressed, "tools[0]", approvals=True).server_label == label
