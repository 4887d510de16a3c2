"""Every field is supported, refused by name, or harmless for a stated reason."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from chorale.api.responses.prepare import read_rules
from chorale.api.responses.request import HARMLESS, REFUSED, ResponsesRequest, parse_request
from chorale.api.responses.tools import read_tools
from chorale.errors import RequestError
from tests.support.responses import CALL, HELLO, MODEL, TOOL, serve


def test_every_field_of_the_sdk_is_supported_harmless_or_refused() -> None:
    known = {*ResponsesRequest.model_fields, *HARMLESS, *REFUSED}
    assert sorted(set(ResponseCreateParamsStreaming.__annotations__) - known) == []
    assert not set(ResponsesRequest.model_fields) & {*HARMLESS, *REFUSED}


@pytest.mark.parametrize(
    ("field", "value", "param", "code"),
    [
        ("conversation", {"name": "x"}, "conversation.name", None),
        ("background_options", {"completion_window": "2h"}, "background_options.completion_window", None),
        ("background_options", {"completion_window": "soonest"}, "background_options", None),
        ("prompt", {"id": "pmpt_1"}, "prompt", "unsupported_parameter"),
        ("moderation", {"model": "m"}, "moderation", "unsupported_parameter"),
        ("personality", "friendly", "personality", "unsupported_parameter"),
        ("text", {"format": {"type": "xml"}}, "text.format", "unsupported_value"),
        ("text", {"format": {"type": "json_schema", "name": "x"}}, "text.format.schema", "invalid_value"),
        ("tool_choice", "required", "tool_choice", "invalid_value"),
        ("tool_choice", {"type": "web_search"}, "tool_choice", "unsupported_value"),
        ("tool_choice", "sometimes", "tool_choice", "invalid_value"),
        ("n", 2, "n", "unsupported_value"),
        ("reasoning", {"mode": "pro"}, "reasoning.mode", "unsupported_value"),
        ("reasoning", {"effort": "extreme"}, "reasoning.effort", "invalid_value"),
        ("reasoning", {"effrt": "low"}, "reasoning.effrt", "unknown_parameter"),
        ("include", ["everything"], "include[0]", "invalid_value"),
        ("metadata", {str(n): "x" for n in range(17)}, "metadata", "array_above_max_length"),
        ("metadata", {"k": 1}, "metadata.k", "invalid_type"),
        ("metadata", {"k": "x" * 513}, "metadata.k", "string_above_max_length"),
        ("tools", [{"type": "function"}], "tools[0].name", "invalid_value"),
        ("tools", [TOOL, {"name": "x"}], "tools[1].type", "invalid_value"),
        ("tools", [TOOL, TOOL], "tools", "invalid_value"),
        ("structured_outputs", {"json": []}, "structured_outputs.json", "invalid_value"),
        ("previous_input_messages", [{}], "previous_input_messages", "unsupported_parameter"),
        ("enable_response_messages", True, "enable_response_messages", "unsupported_parameter"),
        ("max_tokens", 5, "max_tokens", "unknown_parameter"),
        ("truncation", "always", "truncation", "invalid_value"),
        ("stream", "yes", "stream", "invalid_type"),
        ("input", None, "input", "missing_required_parameter"),
        ("input", [], "input", "missing_required_parameter"),
        ("input", 5, "input", "invalid_type"),
        ("chat_template_kwargs", {"tokenize": False}, "chat_template_kwargs.tokenize", "unknown_parameter"),
        ("chat_template_kwargs", {"builtin_tools": 5}, "chat_template_kwargs.builtin_tools", "invalid_type"),
    ],
)  # fmt: skip
def test_invalid_fields_are_refused(field: str, value: Any, param: str, code: str | None) -> None:
    def read() -> None:
        request = parse_request({"input": "x", field: value})
        read_rules(request, read_tools(request.tools, request.tool_choice))

    with pytest.raises(RequestError) as caught:
        read()
    assert caught.value.param == param
    assert caught.value.status == 400
    if code is not None:
        assert caught.value.code == code


@pytest.mark.parametrize(
    "extra",
    [
        {name: None for name in ResponsesRequest.model_fields if name != "input"},
        {"background": False, "conversation": None, "prompt": None},
        {"prompt_cache_options": {"mode": "implicit"}, "context_management": []},
        {"client_metadata": {"a": "b"}, "image": {}, "access_programs": {}},
        {"n": 1, "stream_options": {"include_obfuscation": False}, "text": {"verbosity": "low"}},
        {"include": ["reasoning.encrypted_content", "web_search_call.results"]},
        {"structured_outputs": None, "kv_transfer_params": {}, "prompt_cache_retention": "24h"},
    ],
)  # fmt: skip
def test_neutral_and_harmless_values_are_accepted(extra: dict[str, Any]) -> None:
    assert parse_request({"input": "x", **extra}).input is not None


async def test_fields_are_echoed() -> None:
    async with serve(HELLO) as server:
        sent: dict[str, Any] = {
            "instructions": "Be brief.",
            "metadata": {"a": "b"},
            "user": "u",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
            "temperature": 0.5,
            "top_p": 0.25,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "top_logprobs": 2,
            "max_output_tokens": 131072,
            "max_tool_calls": 3,
            "truncation": "auto",
            "parallel_tool_calls": False,
            "store": False,
        }
        _, body = await server.post(input="x", service_tier="priority", reasoning={"effort": "xhigh"}, **sent)
        assert {key: body[key] for key in sent} == sent
        assert body["reasoning"] == {"effort": "xhigh", "summary": None}
        assert body["service_tier"] == "default"
        assert "Reasoning: high" in server.prompt()
        sampling = server.client.requests[0].sampling
        assert (sampling.temperature, sampling.top_p) == (0.5, 0.25)
        assert sampling.max_tokens == 131072 - len(server.prompt_ids())
        assert (await server.http.get(f"/v1/responses/{body['id']}")).status_code == 404  # store: false
        _, body = await server.post(input="x")
        assert body["max_output_tokens"] is None
        assert body["store"] is True
        assert body["reasoning"] == {"effort": "medium", "summary": None}
        assert body["metadata"] == {}
        assert body["text"] == {"format": {"type": "text"}, "verbosity": "medium"}


async def test_the_effort_of_the_instructions_is_shown_and_inherited() -> None:
    """``tests/api/test_effort.py`` tests which of several efforts acts."""
    system = {"type": "message", "role": "system", "content": "Be brief.\nreasoning: low"}
    user = {"type": "message", "role": "user", "content": "Reasoning: high"}
    async with serve(*[HELLO] * 3) as server:
        _, body = await server.post(input="x", instructions="Reasoning: high\nBe kind.")
        assert body["reasoning"]["effort"] == "high"
        assert body["instructions"] == "Reasoning: high\nBe kind."  # unchanged
        _, body = await server.post(input=[system, user])
        assert body["reasoning"]["effort"] == "low"
        _, body = await server.post(input=[user], previous_response_id=body["id"])
        assert body["reasoning"]["effort"] == "low"


async def test_tools_are_shown_as_they_were_given_and_functions_may_be_nested() -> None:
    """``tests/api/chat/test_built_in_tools.py`` tests what becomes of tools that are not available."""
    async with serve(CALL) as server:
        built_in: list[dict[str, Any]] = [{"type": "web_search"}, {"type": "image_generation"}]
        nested = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
        body = await server.respond(input="x", tools=[*built_in, TOOL, nested])
        assert body["tools"][:3] == [*built_in, TOOL]
        assert body["tools"][3]["name"] == "other"
        assert "type get_weather" in server.prompt()
        assert "type other" in server.prompt()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_input_that_is_too_long_is_refused_or_truncated(stream: bool) -> None:
    long: list[Any] = []
    for n in range(40):
        long.append({"role": "user", "content": f"question {n} " + "word " * 50})
        long.append({"role": "assistant", "content": f"answer {n}"})
    long.append({"role": "user", "content": "the last question"})
    async with serve(HELLO, max_model_len=1000) as server:
        status, body = await server.post(input=long, stream=stream)
        assert status == 400
        assert body["error"]["code"] == "context_length_exceeded"
        assert body["error"]["param"] == "input"
        response = await server.http.post(
            "/v1/responses",
            json={"input": long, "truncation": "auto", "instructions": "Be brief.", "stream": stream},
        )
        assert response.status_code == 200
        text = server.prompt()
        assert 500 < len(server.prompt_ids()) <= 750
        assert "Be brief." in text
        assert "the last question" in text
        assert "answer 39" in text
        assert "question 0 " not in text
        status, body = await server.post(input="word " * 2000, truncation="auto")
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_responses_can_be_read_and_deleted_by_id() -> None:
    async with serve(HELLO) as server:
        for path in ("/v1/responses/nonsense", "/v1/responses/resp_" + "0" * 32):
            for method in ("GET", "DELETE"):
                response = await server.http.request(method, path)
                assert response.status_code == 404
                assert path.rsplit("/", 1)[1] in response.json()["error"]["message"]
        assert (await server.http.get("/v1/responses/x/input_items")).status_code == 404
        _, body = await server.post(input="x")
        base = f"/v1/responses/{body['id']}"
        assert (await server.http.get(f"{base}?stream=true")).json()["error"]["code"] == "unsupported_value"
        assert (await server.http.get(f"{base}?stream=false")).json() == body
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nobody"):
            response = await server.http.get(f"{base}/input_items?{query}")
            assert response.status_code == 400, query
            assert response.json()["error"]["param"] == query.split("=")[0]
        deleted = (await server.http.delete(base)).json()
        assert deleted == {"id": body["id"], "object": "response.deleted", "deleted": True}


async def test_a_store_that_fails_does_not_fail_the_response(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(HELLO) as server:
        await server.store.close()
        for stream in (False, True):
            response = await server.http.post(
                "/v1/responses", json={"model": MODEL, "input": "x", "stream": stream}
            )
            assert response.status_code == 200
            assert (
                b'"store":false' in response.content.replace(b" ", b"").rsplit(b"response.completed", 1)[-1]
            )
        assert server.app.state.metrics.series.counters["chorale:response_store_failures"] == {(): 2.0}
    assert "could not be stored" in caplog.text
