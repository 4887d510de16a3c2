"""Pathological schemas: each is answered or refused within two seconds, and no other stream is slowed.

They took other compilers more than ten seconds, or made them loop. Over sockets and processes: in one
process, a client that reads a stream would be held up by itself. Schemas that are told to the model at
length (``LONG``) go where they are not: there the prompt would take the time, as any long one does.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx2
import pytest

from tests.support.served import Served

SECONDS = 2.0  # of the processors, in which the stream beside has its share
GAP = 0.5  # seconds between two tokens of the stream beside, on a busy machine of two cores


def obj(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = obj(a=schema)
    return schema


TEXT = {"type": "string"}
ITEM = obj(sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, count={"type": "integer"})
ORDER = {
    **obj(
        id={"type": "string", "format": "uuid"},
        when={"type": "string", "format": "date-time"},
        mail={"type": "string", "format": "email"},
        total={"type": "number"},
        items={"type": "array", "maxItems": 50, "items": {"$ref": "#/$defs/item"}},
    ),
    "$defs": {"item": ITEM},
}
SCHEMAS: dict[str, tuple[dict[str, Any], set[int]]] = {  # and the statuses that may come of it
    "an order with references, formats and maxItems": (ORDER, {200}),
    "an enum of 20,000 strings": ({"enum": [f"item {n}" for n in range(20_000)]}, {400}),
    "an enum of 4,000 strings": ({"enum": [f"item {n}" for n in range(4000)]}, {200}),
    "2,000 optional properties": (
        {"type": "object", "properties": {f"p{n}": TEXT for n in range(2000)}},
        {400},
    ),
    "400 nested objects": (nested(400), {400}),
    "30 nested objects": (nested(30), {200}),
    "maxLength of a million": ({"type": "string", "maxLength": 1_000_000}, {200}),
    "minItems of 100,000": ({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}, {200}),
    "not": ({"not": {"type": "string"}}, {400}),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, {400}),
    "repeats of repeats": ({"type": "string", "pattern": "^(([a-z]{1,100}){1,100}){1,100}$"}, {400}),
    "far look back": ({"type": "string", "pattern": "(.*a){20}.{50}"}, {200, 400}),
    "twelve patterns at once": (
        {"allOf": [{"type": "string", "pattern": f".*{char}.*"} for char in "abcdefghijkl"]},
        {200, 400},
    ),
    "a doubling tree": (
        {
            "$defs": {
                **{
                    f"d{n}": obj(l={"$ref": f"#/$defs/d{n + 1}"}, r={"$ref": f"#/$defs/d{n + 1}"})
                    for n in range(30)
                },
                "d30": {"type": "null"},
            },
            "$ref": "#/$defs/d0",
        },
        {200, 400},
    ),
    "a product of choices": (
        {
            "allOf": [
                {"anyOf": [obj(**{f"a{row}_{column}": {"type": "null"}}) for column in range(4)]}
                for row in range(8)
            ]
        },
        {200, 400},
    ),
}


LONG = {"an enum of 4,000 strings"}


def requests(schema: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """The schema in each of its places, by path."""
    raw = {"/v1/completions": {"prompt": "x", "guided_json": schema, "max_tokens": 16}}
    if name in LONG:
        return raw
    form = {"name": "x", "schema": schema}
    messages = [{"role": "user", "content": "hi"}]
    return {
        "/v1/chat/completions": {
            "messages": messages,
            "response_format": {"type": "json_schema", "json_schema": form},
            "max_completion_tokens": 16,
        },
        "/v1/responses": {
            "input": "hi",
            "text": {"format": {"type": "json_schema", **form}},
            "max_output_tokens": 16,
            "store": False,
        },
        **raw,
    }


@pytest.fixture(scope="module", autouse=True)
def warm(served: Served) -> None:
    """The first request with a format also loads what all of them share."""
    for path, body in requests(obj(a=TEXT), "a plain object").items():
        answer = httpx2.post(served.url + path, json={"model": "tiny", **body}, timeout=30)
        assert answer.status_code == 200, answer.text


async def read_gaps(http: httpx2.AsyncClient, gaps: list[float], enough: asyncio.Event) -> None:
    """Streams until told that it is enough; seconds between one token and the next."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        last = time.perf_counter()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
            if enough.is_set():
                return


@pytest.mark.parametrize("name", SCHEMAS)
def test_pathological_schemas_answer_or_refuse_within_two_seconds_without_slowing_others(
    served: Served, name: str
) -> None:
    schema, allowed = SCHEMAS[name]

    async def main() -> None:
        gaps: list[float] = []
        enough = asyncio.Event()
        async with httpx2.AsyncClient(base_url=served.url, timeout=30) as http:
            beside = asyncio.create_task(read_gaps(http, gaps, enough))
            while len(gaps) < 5:
                await asyncio.sleep(0.01)
            gaps.clear()
            for path, body in requests(schema, name).items():
                start = served.cpu_seconds()
                answer = await http.post(path, json={"model": "tiny", **body})
                seconds = served.cpu_seconds() - start
                assert seconds < SECONDS, (path, seconds)
                assert answer.status_code in allowed, (path, answer.text[:500])
                if answer.status_code == 400:
                    assert answer.json()["error"]["type"] == "invalid_request_error"
            num_beside = len(gaps)
            while len(gaps) < num_beside + 5:
                assert not beside.done()
                await asyncio.sleep(0.01)
            enough.set()
            await beside
        assert max(gaps[1:]) < GAP, (name, max(gaps[1:]), len(gaps))

    asyncio.run(main())
