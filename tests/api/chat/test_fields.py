"""Every request field is honoured, refused by name, or harmless for a stated reason."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from chorale.api.chat import request as chat_request
from chorale.api.chat.request import ChatRequest
from chorale.api.completions import request as text_request
from chorale.api.completions.request import CompletionRequest
from chorale.config.options.vllm_flags import read_names
from chorale.engine.types import SamplingSpec
from tests.support.scripted import FINAL, ids, playing
from tests.support.server import served

TABLES = {
    "chat": (
        {**ChatRequest.model_fields, **chat_request.HARMLESS, **chat_request.REFUSED},
        chat_params.CompletionCreateParamsBase,
    ),
    "completions": (
        {**CompletionRequest.model_fields, **text_request.HARMLESS, **text_request.REFUSED},
        text_params.CompletionCreateParamsBase,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_field_of_the_sdk_and_of_vllm_is_handled(name: str) -> None:
    known, params = TABLES[name]
    fields = {line.name for line in read_names(f"field {name}") if not line.reason.startswith("ignored")}
    assert len(fields) > 40
    assert (fields | {*typing.get_type_hints(params), "stream"}) - set(known) == set()


@pytest.mark.parametrize("module", [chat_request, text_request])
def test_the_tables_do_not_overlap(module: Any) -> None:
    model = ChatRequest if module is chat_request else CompletionRequest
    names = [*model.model_fields, *module.HARMLESS, *module.REFUSED]
    assert len(names) == len(set(names))


async def ask(**fields: Any) -> tuple[int, Any, SamplingSpec | None]:
    async with served(playing(FINAL + "ok<|return|>"), unknown_fields="refuse") as server:
        response = await server.chat(**fields)
        sent = server.client.requests
        return response.status_code, response.json(), sent[-1].sampling if sent else None


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format", "unsupported_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "invalid_value"),
    ({"function_call": {"name": "f"}}, "function_call", "invalid_value"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unsupported_value"),
    (
        {"structured_outputs": {"structural_tag": {"a": 1}}},
        "structured_outputs.structural_tag",
        "unsupported_value",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": "yes"}},
        "structured_outputs.disable_any_whitespace",
        "invalid_value",
    ),
    ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern", "unsupported_parameter"),
    ({"chat_template": "{{ x }}"}, "chat_template", "unsupported_parameter"),
    # Refused even next to a function, unlike a declared web_search tool.
    ({"web_search_options": {}, "tools": [FUNCTION]}, "web_search_options", "tool_not_enabled"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "invalid_value",
    ),
    (
        {"chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs.enable_thinking",
        "unknown_parameter",
    ),
    (
        {"chat_template_kwargs": {"builtin_tools": ["python"]}},
        "chat_template_kwargs.builtin_tools",
        "tool_not_enabled",
    ),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "invalid_value"),
    ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
    ({"temperature": 2.5}, "temperature", "above_max_value"),
    ({"max_tokens": 0}, "max_tokens", "below_min_value"),
    ({"stop": ["a"] * 17}, "stop", "array_above_max_length"),
    ({"stop": ""}, "stop", "string_below_min_length"),
    ({"stop_token_ids": [201088]}, "stop_token_ids[0]", "above_max_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"201088": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "above_max_value"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "array_below_min_length"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ({"model": "gpt-5"}, "model", "model_not_found"),
    ({"max_tokenz": 5}, "max_tokenz", "unknown_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=[f"{p}-{c}" for _, p, c in REFUSED])
async def test_refusals_name_the_field(fields: dict[str, Any], param: str, code: str) -> None:
    status, body, sampling = await ask(**fields)
    assert status == (404 if code == "model_not_found" else 400), body
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert sampling is None, "refused requests never reach the engine"


async def test_nulls_and_neutral_values_are_accepted() -> None:
    nulls = dict.fromkeys([*ChatRequest.model_fields, *chat_request.REFUSED, *chat_request.HARMLESS])
    del nulls["messages"]
    assert (await ask(**nulls))[0] == 200
    assert (await ask(echo=False, structured_outputs={}, guided_json=None, best_of=1, tools=[]))[0] == 200
    harmless: dict[str, Any] = dict.fromkeys(chat_request.HARMLESS, "x")
    assert (await ask(**harmless))[0] == 200


async def test_some_sampling_fields_reach_the_engine_in_another_form() -> None:
    """``tests/test_sampling_fields.py`` tests that each arrives."""
    status, body, sampling = await ask(
        top_k=-1,
        allowed_token_ids=[5, 6, 5],
        bad_words=["no"],
        max_completion_tokens=9,
        max_tokens=7,
        seed=-1,
    )
    assert status == 200, body
    assert sampling == SamplingSpec(
        top_k=0,
        allowed_token_ids=(5, 6),
        bad_words=(tuple(ids("no")), tuple(ids(" no"))),
        max_tokens=9,
        seed=2**63 - 1,
    )


async def test_request_fields_override_the_models_defaults() -> None:
    client = playing(FINAL + "ok<|return|>")
    info = client.info_value
    client.info_value = msgspec.structs.replace(info, default_sampling={"temperature": 0.6, "top_k": 50.0})
    async with served(client) as server:
        await server.chat()
        await server.chat(temperature=0)
        first, second = client.requests[0].sampling, client.requests[1].sampling
    assert (first.temperature, first.top_k, first.top_p) == (0.6, 50, 1.0)
    assert (second.temperature, second.top_k) == (0.0, 50)


async def test_the_window_limits_max_tokens_and_overlong_prompts_are_refused() -> None:
    client = playing(FINAL + "ok<|return|>")
    client.info_value = msgspec.structs.replace(client.info_value, max_model_len=200)
    async with served(client) as server:
        response = await server.chat(max_tokens=131072)
        assert response.status_code == 200
        request = client.requests[-1]
        assert request.sampling.max_tokens == 200 - len(request.prompt_token_ids)
        response = await server.chat("word " * 300)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
