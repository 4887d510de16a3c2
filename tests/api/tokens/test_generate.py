"""/inference/v1/generate gives the engine what the other endpoints do, and answers in vLLM's form."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chorale.config.engine import hash_key
from chorale.engine.types import TokenLogprobs
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.event_loop import until
from tests.support.scripted import ANALYSIS, FINAL, NEXT, changing, events_of, ids, playing, scripted
from tests.support.server import Server, served

GENERATE = "/inference/v1/generate"
START = ids("<|start|>assistant")
USER = [{"role": "user", "content": "What is 17 + 25?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED: dict[str, Any] = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": NAMED}
CUSTOM = {"type": "custom", "custom": {"name": "c", "format": {"type": "grammar", "grammar": {
    "syntax": "regex", "definition": "[0-9]+"}}}}  # fmt: skip
FORCED = {"type": "function", "function": {"name": "f"}}
CHAT, TEXT, MESSAGES, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)
SAMPLED: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.5, "seed": -3,
    "frequency_penalty": 0.25, "repetition_penalty": 1.1, "min_tokens": 2, "logit_bias": {"5": 1.5},
    "stop_token_ids": [9, 8], "bad_words": ["tide"], "priority": 4, "ignore_eos": True,
    "allowed_token_ids": [1, 2, 3],
}  # fmt: skip
LARK = {"grammar": 'start: "a" | "b"'}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": USER, **SAMPLED}),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 3, "n": 2, "prompt_logprobs": 1}),
    (CHAT, {"messages": USER, "logprobs": True, "logprob_token_ids": [7, 5, 7]}),
    (TEXT, {"prompt": "One,", "logprobs": 2, "logprob_token_ids": [7, 5]}),
    (CHAT, {"messages": USER, "tools": [TOOL, CUSTOM], "max_tokens": 50}),
    (CHAT, {"messages": USER, "tools": [TOOL, CUSTOM], "tool_choice": FORCED}),
    (CHAT, {"messages": USER, "functions": [NAMED], "function_call": {"name": "f"}}),
    (CHAT, {"messages": USER, "tools": [{**TOOL, "function": {**NAMED, "strict": True}}]}),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}, "thinking_token_budget": 20}),
    (CHAT, {"messages": USER, "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}),
    (CHAT, {"messages": USER, "structured_outputs": {"regex": r"[a-z]+/\d<"}}),
    (TEXT, {"prompt": [5, 6], "structured_outputs": {"choice": ["yes", "no"]}, "logprobs": 2}),
    (TEXT, {"prompt": "One,", "structured_outputs": LARK, "n": 2}),
    (TEXT, {"prompt": "One,", **SAMPLED, "max_tokens": 9}),
    (TEXT, {"prompt": ["One,", "<|start|>user"], "max_tokens": 3, "cache_salt": "mine"}),
    (TEXT, {"prompt": [[1, 2], [3]], "n": 2}),
    (CHAT, {"messages": [*USER, {"role": "assistant", "content": "It is"}], "continue_final_message": True,
            "add_generation_prompt": False, "cache_salt": "mine", "priority": 2}),
    (MESSAGES, {"messages": USER, "max_tokens": 90, "tool_choice": {"type": "any"},
                "tools": [{"name": "f", "input_schema": SCHEMA}]}),
    (MESSAGES, {"messages": USER, "max_tokens": 90, "thinking": {"type": "enabled", "budget_tokens": 50}}),
    (RESPONSES, {"input": "hi", "tools": [{"type": "function", **NAMED, "name": name} for name in "fg"],
                 "tool_choice": {"type": "function", "name": "g"}, "temperature": 0}),
    (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
]  # fmt: skip


async def generate(server: Server, **body: Any) -> Any:
    answer = await server.http.post(GENERATE, json=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("place", range(len(BODIES)))
async def test_a_rendered_request_reaches_the_engine_as_the_request_itself(place: int) -> None:
    path, body = BODIES[place]
    async with served(playing(f"{FINAL}1<|return|>")) as server:
        _, itself = await server.post(path, **body)
        own = server.client.requests[:]
        _, found = await server.post(f"{path}/render", **body)
        rendered = found if path == TEXT else [found]
        assert len(server.client.requests) == len(own) == len(rendered), itself
        for each in rendered:
            assert (await generate(server, **each))[0] == 200
        for one, other in zip(own, server.client.requests[len(own) :], strict=True):
            assert one.sampling == other.sampling
            assert one.prompt_token_ids == other.prompt_token_ids
            assert (one.priority, one.cache_salt) == (other.priority, other.cache_salt)


async def test_the_answer_has_all_tokens_and_scores_in_the_engines_order() -> None:
    text = f"{ANALYSIS}ok{NEXT}{FINAL}42<|return|>"

    def score(request: Any, chunk: Any) -> None:
        chunk.logprobs = [TokenLogprobs(t, -2.0, 3, [7, 8], [-0.5, -1.0]) for t in chunk.token_ids]
        if chunk.token_ids and chunk.token_ids[0] == ids(text)[1]:
            chunk.logprobs[0] = TokenLogprobs(
                chunk.token_ids[0], -1.0, 2, [7, chunk.token_ids[0]], [-0.5, -1.0]
            )

    async with served(changing(text, score)) as server:
        sampling = {"logprobs": 2}
        _, body = await generate(server, token_ids=[1, *START], sampling_params=sampling, request_id="mine")
        assert body["request_id"] == "generate-tokens-mine"
        assert body["output_mode"] == "tokens"
        assert body["model"] == "demo"
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, len(ids(text)))
        absent = ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params", "metrics", "mm_placeholders")
        assert [body[name] for name in absent] == [None] * 5
        (choice,) = body["choices"]
        assert choice["token_ids"] == ids(text)
        assert (choice["finish_reason"], choice["stop_reason"], choice["index"]) == ("stop", None, 0)
        assert [choice[name] for name in ("routed_experts", "sampling_mask", "weight_versions")] == [None] * 3
        content = choice["logprobs"]["content"]
        assert [each["token_id"] for each in content] == ids(text)
        assert (content[0]["logprob"], content[0]["rank"]) == (-2.0, 3)
        assert [(e["token_id"], e["rank"]) for e in content[0]["top_logprobs"]] == [
            (ids(text)[0], 3), (7, 1), (8, 2),
        ]  # fmt: skip
        assert [(e["token_id"], e["rank"]) for e in content[1]["top_logprobs"]] == [(ids(text)[1], 2), (7, 1)]


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_a_stream_adds_up_to_the_body(mode: str) -> None:
    async with served(playing(f"{FINAL}4 漢字 2<|return|>", "x y", with_logprobs=True)) as server:
        body = {
            "token_ids": [1, 2],
            "sampling_params": {"n": 2, "logprobs": 1, "stop_token_ids": [ids(" y")[0]]},
            "output_mode": mode,
            "return_token_ids": True,
        }
        _, whole = await generate(server, **body)
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events_of(
            await server.http.post(GENERATE, json={**body, "stream": True, "stream_options": options})
        )
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1, 2]] + [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        for choice in whole["choices"]:
            of = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert len(of) > 1
            assert [each for c in of for each in c["token_ids"]] == choice["token_ids"]
            scores = [each for c in of for each in c["logprobs"]["content"]]
            assert scores == choice["logprobs"]["content"]
            assert [c["finish_reason"] for c in of] == [None] * (len(of) - 1) + [choice["finish_reason"]]
            if mode == "text":
                assert "".join(c["text"] for c in of) == choice["text"]
        if mode == "text":
            assert whole["choices"][0]["text"] == "final4 漢字 2"
            assert whole["choices"][0]["logprobs"]["content"][-1]["token"] == "<|return|>"


@pytest.mark.parametrize(
    ("prompt", "mode", "kept"),
    [
        (START, "tokens", f"{ANALYSIS}4 and 2{NEXT}{FINAL}4"),  # a chat's: in the final text only
        (START, "text", f"{ANALYSIS}4"),
        ([1], "tokens", f"{ANALYSIS}4"),
    ],
)
async def test_where_a_stop_string_is_found(prompt: list[int], mode: str, kept: str) -> None:
    async with served(playing(f"{ANALYSIS}4 and 2{NEXT}{FINAL}4 or 2<|return|>")) as server:
        body = {"token_ids": prompt, "sampling_params": {"stop": "4"}, "output_mode": mode}
        _, answer = await generate(server, **body)
        (choice,) = answer["choices"]
        assert choice["token_ids"] == ids(kept)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "4")
        assert choice.get("text", "analysis") == "analysis"


async def test_derender_mode_parses_the_message_and_hides_tokens_with_the_reasoning() -> None:
    call = (
        f"{ANALYSIS}think{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}<|call|>"
    )
    async with served(playing(call)) as server:
        for shown in (True, False):
            context = {"tools": [TOOL], "tool_choice": "auto", "include_reasoning": shown}
            body = {
                "token_ids": START,
                "sampling_params": {},
                "output_mode": "derender",
                "parse_context": context,
            }
            _, answer = await generate(server, **body)
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
            assert choice["message"].get("reasoning") == ("think" if shown else None)
            assert choice["token_ids"] == (ids(call) if shown else None)


async def test_a_failed_choice_is_an_error() -> None:
    async with served(scripted((5,), finish_reason="error")) as server:
        status, body = await generate(server, token_ids=[1], sampling_params={})
        assert (status, body["error"]["code"]) == (500, "engine_error")
        body = {"token_ids": [1], "sampling_params": {}, "stream": True}
        assert events_of(await server.http.post(GENERATE, json=body))[-1]["error"]["code"] == "engine_error"


FINE: dict[str, Any] = {"token_ids": [1, 2], "sampling_params": {}}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"token_ids": [201088]}, "token_ids[0]", "above_max_value"),
        ({"token_ids": [-1]}, "token_ids[0]", "below_min_value"),
        ({"token_ids": [1] * 131_072}, "token_ids", "context_length_exceeded"),
        ({"token_ids": [1] * 196_609}, "token_ids", "array_above_max_length"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "unsupported_parameter"),
        ({"features": {"mm_hashes": {}}}, "features", "unsupported_parameter"),
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        ({"sampling_params": {"nonsense": 1}}, "sampling_params.nonsense", "unknown_parameter"),
        ({"sampling_params": {"extra_args": {"a": 1}}},
         "sampling_params.extra_args", "unsupported_parameter"),
        ({"sampling_params": {"n": 17}}, "sampling_params.n", "above_max_value"),
        ({"sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias", "invalid_value"),
        ({"sampling_params": {"structured_outputs": {"regex": "("}}},
         "sampling_params.structured_outputs.regex", "unsupported_value"),
        ({"sampling_params": {"thinking_token_budget": 5}},
         "sampling_params.thinking_token_budget", "invalid_value"),
        ({"sampling_params": {"detokenize": False}, "output_mode": "text"},
         "sampling_params.detokenize", "invalid_value"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True},
         "sampling_params.prompt_logprobs", "invalid_value"),
        ({"output_mode": "derender", "stream": True}, "output_mode", "invalid_value"),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
        ({"parse_context": {"tools": [{"type": "function"}]}},
         "parse_context.tools[0].function", "invalid_value"),
        ({"parse_context": {"tools": [{"type": "web_search"}]}}, "parse_context.tools", "unsupported_value"),
    ],
)  # fmt: skip
async def test_a_wrong_field_is_named(change: dict[str, Any], param: str, code: str) -> None:
    async with served(unknown_fields="refuse") as server:
        status, body = await generate(server, **{**FINE, **change})
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code)
        assert not server.client.requests


async def test_abort_ends_requests_of_the_same_key_only() -> None:
    client = ScriptedClient(lambda request, index: Script((5, 6), hang=True))
    async with served(client, keys=(hash_key("one"), hash_key("two")), listens=True) as server:

        def post(key: str, path: str, **body: Any) -> Any:
            return server.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})

        body = {**FINE, "sampling_params": {"n": 2}}
        first = asyncio.ensure_future(post("one", GENERATE, request_id="x", **body))
        second = asyncio.ensure_future(post("two", GENERATE, request_id="x", **body))
        third = asyncio.ensure_future(post("one", GENERATE, request_id="y", stream=True, **body))
        await until(lambda: len(client.requests) == 3)
        for name in ("generate-tokens-x", "z"):
            assert (await post("one", "/inference/v1/abort_requests", request_ids=[name])).status_code == 200
        answer = (await first).json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
        assert not second.done()
        await post("one", "/inference/v1/abort_requests", request_ids=["y"])
        ends = [choice["finish_reason"] for chunk in events_of(await third) for choice in chunk["choices"]]
        assert ends.count("abort") == 2
        second.cancel()  # the client disconnects
        await asyncio.gather(second, return_exceptions=True)
        await until(lambda: not client.num_in_flight)
        for wrong in ({}, {"request_ids": []}, {"request_ids": [1]}, {"request_ids": ["x" * 513]}):
            assert (await post("one", "/inference/v1/abort_requests", **wrong)).status_code == 400
