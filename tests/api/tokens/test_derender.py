"""The derender endpoints give what the chat and completions endpoints give for the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripted import ANALYSIS, FINAL, NEXT, events_of, fold_chat, ids, playing, without_ids
from tests.support.server import Server, served

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
USER = [{"role": "user", "content": "hi"}]
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
SCRIPTS = {
    "reasoning": f"{ANALYSIS}so 漢字{NEXT}{FINAL}It is 4 2.<|return|>",
    "call": f'{ANALYSIS}call{NEXT}{CALL}{{"a": 1}}<|call|>',
    "cut": f"{ANALYSIS}so{NEXT}{FINAL}It is",
    "malformed": f"<|channel|>final<|channel|>{FINAL}<|message|>odd<|return|>",
}
FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True},
    {"stop": ["is 4"], "include_stop_str_in_output": True},
    {"include_reasoning": False, "stop_token_ids": [ids(" 4")[0]]},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": False},
]


async def rendered(server: Server, path: str, body: dict[str, Any]) -> Any:
    answer = await server.http.post(f"{path}/render", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items() if key not in ("id", "created")}
    return [comparable(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("place", range(len(FIELDS)))
async def test_a_chat_is_derendered_as_the_chat_endpoint_answers_it(script: str, place: int) -> None:
    body = {"messages": USER, **FIELDS[place]}
    async with served(
        playing(SCRIPTS[script], num_cached_tokens=5, with_logprobs="logprobs" in body)
    ) as server:
        expected = (await server.http.post(CHAT, json=body)).json()
        request = await rendered(server, CHAT, body)
        generated = (await server.http.post(GENERATE, json=request)).json()
        asked = {
            "chat_request": body,
            "generate_response": generated,
            "prompt_token_ids": request["token_ids"],
        }
        found = await server.http.post(f"{CHAT}/derender", json=asked)
        assert found.status_code == 200, found.text
        assert comparable(found.json()) == comparable(expected)
        assert found.json()["id"] == generated["request_id"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("place", range(len(FIELDS)))
async def test_the_chunks_of_a_stream_are_derendered_one_by_one(script: str, place: int) -> None:
    body = {"messages": USER, "stream": True, **FIELDS[place]}
    async with served(playing(SCRIPTS[script], with_logprobs="logprobs" in body)) as server:
        expected = fold_chat(events_of(await server.http.post(CHAT, json=body)))
        request = await rendered(server, CHAT, body)
        chunks: list[Any] = []
        states: dict[int, Any] = {}
        for chunk in events_of(await server.http.post(GENERATE, json=request)):
            index = chunk["choices"][0]["index"]
            asked = {
                "stream": True,
                "chat_request": body,
                "generate_chunk": chunk,
                "stream_state": states.get(index),
            }
            answer = (await server.http.post(f"{CHAT}/derender", json=asked)).json()
            chunks.append(answer["chunk"])
            states[index] = answer["stream_state"]
        roles = [choice["delta"].get("role") for chunk in chunks for choice in chunk["choices"]]
        assert roles.count("assistant") == body.get("n", 1)
        found = fold_chat(chunks)
        assert found.keys() == expected.keys()
        for index in expected:
            assert without_ids(found[index]) == without_ids(expected[index])


async def test_an_answer_that_would_need_the_model_again_ends() -> None:
    async with served(playing(f"{ANALYSIS}no answer<|return|>")) as server:
        generated = {
            "request_id": "a",
            "choices": [{"index": 0, "token_ids": ids(f"{ANALYSIS}hm<|return|>")}],
        }
        asked = {"chat_request": {"messages": USER}, "generate_response": generated, "prompt_tokens": 7}
        body = (await server.http.post(f"{CHAT}/derender", json=asked)).json()
        (choice,) = body["choices"]
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "hm")
        assert choice["finish_reason"] == "stop"
        assert body["usage"]["prompt_tokens"] == 7
        assert not server.client.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_scores_and_stop_reasons_are_kept_without_being_requested(stream: bool) -> None:
    text = f"{FINAL}4 2<|return|>"
    scores = [
        {"token_id": each, "logprob": -1.0, "top_logprobs": [{"token_id": 7, "logprob": -0.5}]}
        for each in ids(text)
    ]
    choice = {"index": 0, "token_ids": ids(text), "finish_reason": "stop", "stop_reason": 99}
    generated = {"request_id": "a", "choices": [{**choice, "logprobs": {"content": scores}}]}
    name = "generate_chunk" if stream else "generate_response"
    async with served(playing(text)) as server:
        asked = {"chat_request": {"messages": USER}, "stream": stream, name: generated}
        body = (await server.http.post(f"{CHAT}/derender", json=asked)).json()
        (found,) = (body["chunk"] if stream else body)["choices"]
        assert found["stop_reason"] == 99
        content = found["logprobs"]["content"]
        assert [(each["token"], each["top_logprobs"][0]["token"]) for each in content] == [
            (token, "(") for token in ("4", " ", "2")
        ]
        name = name if stream else "generate_responses"
        asked = {"stream": stream, name: generated if stream else [generated]}
        body = (await server.http.post(f"{TEXT}/derender", json=asked)).json()
        (found,) = (body["chunk"] if stream else body)["choices"]
        assert (found["stop_reason"], len(found["logprobs"]["tokens"])) == (99, len(ids(text)) - 1)


TEXTS: list[dict[str, Any]] = [
    {"prompt": ["One,", "Two"], "n": 2, "logprobs": 1, "return_token_ids": True},
    {"prompt": [1, 2], "echo": True, "stop": "4"},
    {"prompt": [1, 2], "skip_special_tokens": False},
]


@pytest.mark.parametrize("place", range(len(TEXTS)))
async def test_a_completion_is_derendered_as_the_completions_endpoint_answers_it(place: int) -> None:
    body = TEXTS[place]
    async with served(playing("<|start|>is 漢字 4 2<|return|>", with_logprobs="logprobs" in body)) as server:
        expected = (await server.http.post(TEXT, json=body)).json()
        requests = await rendered(server, TEXT, body)
        generated = [(await server.http.post(GENERATE, json=each)).json() for each in requests]
        prompts = [each["token_ids"] for each in requests]
        asked = {"completion_request": body, "generate_responses": generated, "prompt_token_ids": prompts}
        found = await server.http.post(f"{TEXT}/derender", json=asked)
        assert found.status_code == 200, found.text
        assert comparable(found.json()) == comparable(expected)
        streamed: list[list[Any]] = [[] for _ in range(body.get("n", 1))]
        states: dict[int, Any] = {}
        for chunk in events_of(await server.http.post(GENERATE, json={**requests[0], "stream": True})):
            index = chunk["choices"][0]["index"]
            one = {"completion_request": body, "stream": True, "generate_chunk": chunk}
            one |= {"prompt_token_ids": prompts[0], "stream_state": states.get(index)}
            answer = (await server.http.post(f"{TEXT}/derender", json=one)).json()
            states[index] = answer["stream_state"]
            streamed[index] += answer["chunk"]["choices"]
        for choices, whole in zip(streamed, expected["choices"], strict=False):
            assert "".join(choice["text"] for choice in choices) == whole["text"]
            assert choices[-1]["finish_reason"] == whole["finish_reason"]
            offsets = [each for c in choices for each in (c["logprobs"] or {}).get("text_offset", ())]
            assert offsets == (whole["logprobs"] or {}).get("text_offset", [])


def answered(**change: Any) -> dict[str, Any]:
    return {"request_id": "a", "choices": [{"index": 0, "token_ids": [5], **change}]}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, {}, "generate_response", "missing_required_parameter"),
        (CHAT, {"stream": True}, "generate_chunk", "missing_required_parameter"),
        (CHAT, {"generate_response": answered(token_ids=[201088])},
         "generate_response.choices[0].token_ids[0]", "above_max_value"),
        (CHAT, {"generate_response": answered(token_ids=[])},
         "generate_response.choices[0]", "invalid_value"),
        (CHAT, {"generate_response": answered(index=1)}, "generate_response.choices[0]", "invalid_value"),
        (CHAT, {"generate_response": answered(finish_reason="abort")},
         "generate_response.choices[0].finish_reason", "invalid_value"),
        (CHAT, {"generate_response": {**answered(), "output_mode": "text"}},
         "generate_response.output_mode", "invalid_value"),
        (CHAT, {"generate_response": answered(), "prompt_tokens": 131_072},
         "chat_request.messages", "context_length_exceeded"),
        (CHAT, {"generate_response": answered(),
                "chat_request": {"messages": USER, "tools": [{"type": "function"}]}},
         "chat_request.tools[0].function", "invalid_value"),
        (CHAT, {"generate_response": answered(),
                "chat_request": {"messages": USER, "tools": [{"type": "web_search"}]}},
         "chat_request.tools", "unsupported_value"),
        (CHAT, {"generate_response": answered(), "model": "other"}, "model", "model_not_found"),
        (TEXT, {}, "generate_responses", "missing_required_parameter"),
        (TEXT, {"generate_responses": [answered()], "prompt_tokens": [1, 2]},
         "prompt_tokens", "invalid_value"),
        (TEXT, {"generate_responses": [answered()], "completion_request": {"n": 2}},
         "generate_responses[0].choices", "invalid_value"),
        (TEXT, {"stream": True, "generate_chunk": answered(), "prompt_token_ids": [[1]]},
         "prompt_token_ids", "invalid_value"),
    ],
)  # fmt: skip
async def test_a_wrong_body_is_refused(path: str, body: dict[str, Any], param: str, code: str) -> None:
    async with served() as server:
        known = {"chat_request": {"messages": USER}} if path == CHAT else {}
        answer = await server.http.post(f"{path}/derender", json={**known, **body})
        assert answer.status_code == (404 if param == "model" else 400)
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)
