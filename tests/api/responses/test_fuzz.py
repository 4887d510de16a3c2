"""Whatever a client sends, the reply is an answer or an error that names its fault: never a 5xx."""

from __future__ import annotations

import copy
import random
from typing import Any

from tests.support.responses import CALL, MODEL, TOOL, serve
from tests.support.server import run

WHOLE: dict[str, Any] = {
    "model": "gpt-oss-test",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "system", "content": "rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "a"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "1"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x"}], "phase": None},
        {"role": "user", "content": "more"},
    ],
    "tools": [TOOL, {"type": "web_search", "filters": {"allowed_domains": ["a"]}}],
    "tool_choice": "auto",
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "temperature": 0.5,
    "top_logprobs": 2,
    "max_output_tokens": 50,
    "stream": False,
    "store": True,
    "previous_response_id": None,
    "truncation": "auto",
    "stream_options": {"include_obfuscation": True},
    "chat_template_kwargs": {"model_identity": "x"},
}  # fmt: skip

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 5.5, 10**30, 2**63, -(2**63) - 1, 1e308, "", "x", "\x00", "é" * 600,
    "<|end|>", "null",
    [], [None], [[]], {}, {"type": None}, {"": ""}, {"type": "message"}, {"type": "input_image"}, ["auto"],
    "resp_x",
    {"type": "function", "function": None}, {"type": "function", "function": {"name": "n", "parameters": 5}},
    {"type": "item_reference", "id": "msg_" + "0" * 32}, [{"type": "item_reference"}], {"role": "user"},
]  # fmt: skip


def mutate(rng: random.Random, value: Any) -> Any:
    """Replace, remove or duplicate something, anywhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            del value[key]
        elif rng.random() < 0.1:
            value[rng.choice(["id", "type", "text", "call_id", "zzz", "role"])] = rng.choice(ODD)
        else:
            value[key] = mutate(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        if rng.random() < 0.1:
            value.append(copy.deepcopy(value[index]))
        else:
            value[index] = mutate(rng, value[index])
        return value
    return copy.deepcopy(rng.choice(ODD))


def test_no_request_is_a_server_error() -> None:
    async def scenario() -> None:
        rng = random.Random(11)
        async with serve(CALL, tokens_per_step=64) as server:
            statuses: dict[int, int] = {}
            for number in range(1500):
                body = copy.deepcopy(WHOLE)
                for _ in range(rng.randrange(1, 3)):
                    body = mutate(rng, body)
                    if not isinstance(body, dict):
                        body = {"input": body}
                path = "/v1/responses" if number % 5 else "/v1/responses/input_tokens"
                response = await server.http.post(path, json=body)
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                assert response.status_code in (200, 400, 404), (body, response.text)
                if response.status_code != 200:
                    error = response.json()["error"]
                    assert set(error) == {"message", "type", "param", "code"}
                    assert error["message"]
                    assert isinstance(error["code"], str)
                    assert len(error["message"]) < 4000
            assert statuses[200] > 100
            assert statuses[400] > 100

    run(scenario)


QUERIES = [
    "stream",
    "starting_after",
    "include",
    "include[]",
    "include_obfuscation",
    "after",
    "limit",
    "order",
]
VALUES = ["true", "1", "-1", "9" * 30, "", "x", "é", "asc", "desc", "resp_" + "0" * 32, "\x00", "٣"]


def test_no_question_about_state_is_a_server_error() -> None:
    """Conversations, compaction, cancel, and every query string, mutated."""

    async def scenario() -> None:
        rng = random.Random(12)
        async with serve(CALL, tokens_per_step=64) as server:
            item = {"type": "message", "role": "user", "content": "hi"}
            made = (await server.http.post("/v1/conversations", json={"items": [item]})).json()["id"]
            response = (await server.post(input="x", background=True))[1]["id"]
            bodies: list[tuple[str, dict[str, Any]]] = [
                ("/v1/conversations", {"items": WHOLE["input"], "metadata": {"a": "b"}}),
                (f"/v1/conversations/{made}", {"metadata": {"a": "b"}}),
                (f"/v1/conversations/{made}/items", {"items": WHOLE["input"], "include": []}),
                ("/v1/responses/compact", {"model": MODEL, "input": WHOLE["input"], "instructions": "x"}),
                ("/v1/responses", {"input": "x", "conversation": {"id": made}, "background": False}),
                ("/v1/responses", {"input": "x", "background": True, "background_options": {}}),
            ]
            reads = [
                f"/v1/responses/{response}",
                f"/v1/responses/{response}/input_items",
                f"/v1/conversations/{made}/items",
                f"/v1/conversations/{rng.choice(VALUES[5:9])}",
                f"/v1/responses/{rng.choice(VALUES[5:9])}/input_items",
            ]
            statuses: dict[int, int] = {}
            for number in range(900):
                if number % 3:
                    path, body = copy.deepcopy(rng.choice(bodies))
                    answer = await server.http.post(path, json=mutate(rng, body) or {})
                else:
                    query = {rng.choice(QUERIES): rng.choice(VALUES) for _ in range(rng.randrange(3))}
                    answer = await server.http.get(rng.choice(reads), params=query)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                # 500: a compaction for which the scripted model, which only calls tools, wrote no summary
                assert answer.status_code in (200, 400, 404, 429) or "no summary" in answer.text, answer.text
                if answer.status_code >= 400:
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert statuses[200] > 100
            assert statuses[400] > 100

    run(scenario)
