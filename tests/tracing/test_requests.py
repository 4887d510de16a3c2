"""What is recorded of requests, whatever exports it: one span each, its rounds and tools, never any text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import websockets

from chorale.api.telemetry.generation_span import GenerationSpan
from chorale.engine.types import ChunkTimings, TokenChunk
from chorale.errors import EngineDeadError
from chorale.tools.contract import Progress, ToolCall, ToolResult
from chorale.tracing.context import CURRENT, RequestContext, outgoing_headers
from chorale.tracing.record import RequestRecord
from tests.support.engine.scripted_client import Script
from tests.support.event_loop import until
from tests.support.raw_http import call
from tests.support.responses import MODEL
from tests.support.scripted import FINAL, ids, in_rounds, playing
from tests.support.scripted_tools import ScriptedService, result, tools_served
from tests.support.serve.harness import request
from tests.support.server import Server, served
from tests.support.tracing.spans import KeptTracer

ANSWER = f"{FINAL}The sea is green.<|return|>"
CLIENT = "ab" * 16
PARENT = {"traceparent": f"00-{CLIENT}-{'cd' * 8}-01"}
CHAT = {"messages": [{"role": "user", "content": "SECRET?"}]}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/chat/completions", "chat", CHAT),
    ("/v1/chat/completions", "chat", {**CHAT, "stream": True}),
    ("/v1/completions", "text_completion", {"prompt": "SECRET?", "max_tokens": 50}),
    ("/v1/completions", "text_completion", {"prompt": "SECRET?", "max_tokens": 50, "stream": True}),
    ("/v1/responses", "chat", {"input": "SECRET?"}),
    ("/v1/responses", "chat", {"input": "SECRET?", "stream": True}),
    ("/v1/messages", "chat", {**CHAT, "max_tokens": 50}),
    ("/v1/messages", "chat", {**CHAT, "max_tokens": 50, "stream": True}),
    ("/invocations", "chat", CHAT),
]


@pytest.mark.parametrize(("path", "operation", "body"), CASES)
async def test_a_request_has_one_span(path: str, operation: str, body: dict[str, Any]) -> None:
    tracer = KeptTracer()
    async with served(playing(ANSWER, num_cached_tokens=3), names=(MODEL,), tracer=tracer) as server:
        answer = await server.http.post(path, json={"model": MODEL, **body}, headers=PARENT)
    assert answer.status_code == 200, answer.text
    span = tracer.only(f"{operation} {MODEL}")
    assert (span.kind, span.trace_id, span.error) == ("server", CLIENT, None)
    seen = span.attributes
    assert seen["http.route"] == path
    assert seen["http.response.status_code"] == 200
    assert seen["gen_ai.operation.name"] == operation
    assert seen["gen_ai.request.model"] == seen["gen_ai.response.model"] == MODEL
    assert seen["gen_ai.request.id"] == answer.headers["x-request-id"]
    assert seen["gen_ai.response.id"] in answer.text
    assert seen["gen_ai.response.finish_reasons"] == ("stop",)
    assert seen["gen_ai.usage.output_tokens"] == len(ids(ANSWER))
    assert seen["gen_ai.usage.cache_read.input_tokens"] == 3
    assert seen["gen_ai.latency.e2e"] >= seen["gen_ai.latency.time_to_first_token"] >= 0
    (generate,) = tracer.below(span)
    assert generate.name == "generate"
    assert generate.attributes["gen_ai.usage.input_tokens"] == seen["gen_ai.usage.input_tokens"] > 0
    assert len(tracer.ended) == 2
    everything = repr([(each.name, each.attributes) for each in tracer.ended])
    assert "SECRET" not in everything
    assert "green" not in everything


def test_the_times_of_a_generation_are_those_of_its_steps() -> None:
    root = KeptTracer().start("request", {}, {}, "server")
    span = GenerationSpan(request("a", 1), RequestContext("a", root, RequestRecord()))
    timings = ChunkTimings(
        arrival=1.0, first_scheduled=1.25, first_token=1.75, last_token=1.875, num_preemptions=0
    )
    span.observe(TokenChunk("a", 0, [5], "length", timings=timings))
    span.end(0)
    (generate,) = root.tracer.below(root)
    names = ("queue", "model_prefill", "model_decode", "model_inference")
    assert [generate.attributes[f"gen_ai.latency.time_in_{name}"] for name in names] == [
        0.25,
        0.5,
        0.125,
        0.625,
    ]


async def test_usage_equals_the_usage_of_the_api() -> None:
    tracer = KeptTracer()
    async with served(playing(ANSWER, ANSWER, num_cached_tokens=7), tracer=tracer) as server:
        answer = await server.chat("hello", n=2, temperature=0.5, seed=9, max_tokens=40)
    usage = answer.json()["usage"]
    seen = tracer.only("chat").attributes
    assert usage["prompt_tokens"] == seen["gen_ai.usage.input_tokens"]
    assert usage["completion_tokens"] == seen["gen_ai.usage.output_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == seen["gen_ai.usage.cache_read.input_tokens"]
    assert seen["gen_ai.response.finish_reasons"] == ("stop", "stop")
    wanted = {"temperature": 0.5, "seed": 9, "max_tokens": 40, "choice.count": 2}
    assert {name: seen[f"gen_ai.request.{name}"] for name in wanted} == wanted


async def test_reads_probes_and_unsampled_requests_have_no_span() -> None:
    tracer, unsampled = KeptTracer(), KeptTracer(samples=False)

    async with served(playing(ANSWER), tracer=tracer) as server:
        for path in ("/health", "/v1/models", "/metrics"):
            assert (await server.http.get(path)).status_code == 200
    async with served(playing(ANSWER), tracer=unsampled) as server:
        assert (await server.chat()).status_code == 200

    assert tracer.spans == []
    assert len(unsampled.spans) == 1  # it passes the trace on; nothing below it
    assert unsampled.ended == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({**CHAT, "temperature": 9}, 400, "above_max_value"),
        ({**CHAT, "model": "other"}, 404, "model_not_found"),
    ],
)
async def test_a_refused_request_names_its_error_and_did_not_fail(
    body: dict[str, Any], status: int, code: str
) -> None:
    tracer = KeptTracer()
    async with served(playing(ANSWER), tracer=tracer) as server:
        assert (await server.http.post("/v1/chat/completions", json=body)).status_code == status
    span = tracer.only("chat demo")
    assert span.attributes["error.type"] == code
    assert span.error is None  # the client's fault


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_engine_is_recorded(stream: bool) -> None:
    tracer = KeptTracer()
    dies = Script(ids(ANSWER)[:4], error=EngineDeadError("gone"))
    async with served(playing(ANSWER), tracer=tracer) as server:
        server.client.source = lambda request, index: dies
        answer = await server.chat("hello", stream=stream)
    assert answer.status_code == (200 if stream else 503)
    span = tracer.only("chat")
    assert span.error == EngineDeadError("gone").code
    assert tracer.only("generate").error == span.error


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_span(stream: bool) -> None:
    tracer = KeptTracer()

    async with served(playing(ANSWER), tracer=tracer, listens=True) as server:
        server.client.source = lambda request, index: Script(ids(ANSWER)[:5], hang=True)
        await leave(server, {**CHAT, "stream": stream})
        await until(lambda: len(tracer.ended) == 2, "both spans")

    span = tracer.only("chat")
    for each in (span, tracer.only("generate")):
        assert each.attributes["error.type"] == "client_disconnected"
        assert each.error is None  # the server did nothing wrong
    assert span.attributes["gen_ai.usage.output_tokens"] >= 1


async def leave(server: Server, body: dict[str, Any]) -> None:
    """POST a chat, and disconnect once the engine has generated."""
    asked = asyncio.create_task(call(server.port, "POST", "/v1/chat/completions", body))
    await until(lambda: server.client.requests, "the request")
    await asyncio.sleep(0.1)
    asked.cancel()


async def test_a_background_response_has_a_child_span() -> None:
    tracer = KeptTracer()

    async with served(playing(ANSWER, delay=0.01), names=(MODEL,), tracer=tracer) as server:
        made = await server.sdk.responses.create(model=MODEL, input="hello", background=True)
        while made.status not in ("completed", "failed"):
            await asyncio.sleep(0.02)
            made = await server.sdk.responses.retrieve(made.id)
        while server.state.background.num_running:
            await asyncio.sleep(0.01)

    request, background, generate = (tracer.only(name) for name in ("chat", "background", "generate"))
    assert background.parent is request
    assert generate.parent is background
    assert "gen_ai.usage.output_tokens" not in request.attributes  # counted once
    assert background.attributes["gen_ai.usage.output_tokens"] == len(ids(ANSWER))
    assert background.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert background.error is None
    assert len(tracer.ended) == 3


async def test_each_response_over_a_websocket_has_a_span() -> None:
    tracer = KeptTracer()

    async with (
        served(playing(ANSWER), tracer=tracer, listens=True) as server,
        websockets.connect(
            f"ws://127.0.0.1:{server.port}/v1/responses", additional_headers=PARENT
        ) as connection,
    ):
        for temperature in (1, 1, 9):
            fields = {"type": "response.create", "input": "SECRET?", "temperature": temperature}
            await connection.send(json.dumps(fields))
            ends = ("response.completed", "error")
            while json.loads(await connection.recv())["type"] not in ends:
                pass

    spans = [span for span in tracer.ended if span.kind == "server"]
    assert [span.name for span in spans] == ["chat demo"] * 3
    assert {span.trace_id for span in spans} == {CLIENT}
    assert [span.attributes["http.response.status_code"] for span in spans] == [200, 200, 400]
    assert [span.attributes.get("error.type") for span in spans] == [None, None, "above_max_value"]
    assert [len(tracer.below(span)) for span in spans] == [1, 1, 0]
    assert len({span.attributes["gen_ai.request.id"] for span in spans}) == 3


PYTHON = "<|channel|>analysis to=python code<|message|>print('SECRET')<|call|>"


async def test_tools_and_later_rounds_are_below_the_request() -> None:
    tracer, sent = KeptTracer(), list[dict[str, str]]()

    async def tool(call: ToolCall) -> AsyncGenerator[Progress | ToolResult]:
        sent.append(outgoing_headers())
        yield result(call, "42", failed=len(sent) == 2)

    service = ScriptedService(tool)
    async with tools_served(PYTHON, PYTHON, ANSWER, tools=service, tracer=tracer) as server:
        body = {"input": "x", "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}
        answer = await server.http.post("/v1/responses", json={"model": MODEL, **body}, headers=PARENT)
        assert answer.status_code == 200, answer.text
        assert (
            answer.json()["usage"]["output_tokens"]
            == tracer.only("chat").attributes["gen_ai.usage.output_tokens"]
        )

    request = tracer.only("chat")
    below = tracer.below(request)
    assert [span.name for span in below] == [
        "generate", "execute_tool python", "generate", "execute_tool python", "generate",
    ]  # fmt: skip
    tools = below[1::2]
    assert [span.error for span in tools] == [None, "tool_error"]
    assert tools[0].attributes["gen_ai.operation.name"] == "execute_tool"
    # A service goes on below the call, and learns nothing of the client's vendor.
    assert sent == [{"traceparent": f"00-{CLIENT}-{span.span_id}-01"} for span in tools]
    assert "SECRET" not in repr([span.attributes for span in tracer.ended])


async def test_nothing_changes_without_a_tracer() -> None:
    seen: list[Any] = []

    async with served(in_rounds(ANSWER)) as server:
        source = server.client.source

        def spy(request: Any, index: int) -> Any:
            seen.append((CURRENT.get(), outgoing_headers()))
            return source(request, index)

        server.client.source = spy
        assert (await server.chat()).status_code == 200

    ((context, headers),) = seen
    assert context.span is None
    assert headers == {}
    assert context.record.rounds == []  # the streams are not wrapped
