"""Random requests about stored state get an answer or a 4xx."""

from __future__ import annotations

import copy
import random
from typing import Any

from tests.support.responses import CALL, MODEL, serve

ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "system", "content": "rules"},
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "a"}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "1"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "x"}], "phase": None},
    {"role": "user", "content": "more"},
]

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 5.5, 10**30, 2**63, -(2**63) - 1, 1e308, "", "x", "\x00", "é" * 600,
    "<|end|>", "null",
    [], [None], [[]], {}, {"type": None}, {"": ""}, {"type": "message"}, {"type": "input_image"}, ["auto"],
    "resp_x",
    {"type": "function", "function": None}, {"type": "function", "function": {"name": "n", "parameters": 5}},
    {"type": "item_reference", "id": "msg_" + "0" * 32}, [{"type": "item_reference"}], {"role": "user"},
]  # fmt: skip


def mutate(rng: random.Random, value: Any) -> Any:
    """Replaces, removes or duplicates a random value within ``value``."""
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


async def test_no_stateful_request_causes_a_server_error() -> None:
    """Mutates requests for conversations, compaction and responses, and query strings."""
    rng = random.Random(12)
    async with serve(CALL, tokens_per_step=64) as server:
        item = {"type": "message", "role": "user", "content": "hi"}
        made = (await server.http.post("/v1/conversations", json={"items": [item]})).json()["id"]
        response = (await server.post(input="x", background=True))[1]["id"]
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/conversations", {"items": ITEMS, "metadata": {"a": "b"}}),
            (f"/v1/conversations/{made}", {"metadata": {"a": "b"}}),
            (f"/v1/conversations/{made}/items", {"items": ITEMS, "include": []}),
            ("/v1/responses/compact", {"model": MODEL, "input": ITEMS, "instructions": "x"}),
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
        for number in range(300):
            if number % 3:
                path, body = copy.deepcopy(rng.choice(bodies))
                answer = await server.http.post(path, json=mutate(rng, body) or {})
            else:
                query = {rng.choice(QUERIES): rng.choice(VALUES) for _ in range(rng.randrange(3))}
                answer = await server.http.get(rng.choice(reads), params=query)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            # Compaction is a 500, because the scripted model only calls tools and writes no summary.
            assert answer.status_code in (200, 400, 404, 429) or "no summary" in answer.text, answer.text
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert statuses[200] > 30
        assert statuses[400] > 30
