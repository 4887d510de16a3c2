"""1,000 requests, 50 schemas, three efforts, streamed and not, tools present.

All are valid; a random model of the full vocabulary writes them.
About four minutes on one core.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from tests.support.grammar.schema_cases import BIAS, SCHEMAS, obj, valid
from tests.support.grammar.structured import choose, response_to, run, text_of
from tests.support.local_client import LocalClient
from tests.support.server import Server

NUM_REQUESTS = 1000
TOOL = {"name": "f", "parameters": obj(a={"type": "integer", "minimum": 0, "maximum": 9})}


def fifty() -> list[dict[str, Any]]:
    """The cases, and pairs of them within one object."""
    simple = [schema for name, schema in SCHEMAS.items() if name not in ("recursive", "anything")]
    pairs = [obj(first=a, second=b) for a, b in itertools.pairwise(simple)]
    triples = [obj(x={"type": "array", "items": schema, "minItems": 1, "maxItems": 2}) for schema in simple]
    return [*SCHEMAS.values(), *pairs, *triples][:50]


async def one(server: Server, number: int, schema: dict[str, Any], gate: asyncio.Semaphore) -> None:
    effort = ("low", "medium", "high")[number % 3]
    common: dict[str, Any] = {"seed": number, "stream": number % 2 == 0, "temperature": 1, "logit_bias": BIAS}
    form = {"name": "answer", "schema": schema, "strict": True}
    async with gate:
        if number % 4 < 2:
            tools = [{"type": "function", "function": TOOL}]
            choice = await choose(
                server,
                response_format={"type": "json_schema", "json_schema": form},
                reasoning_effort=effort,
                max_tokens=2500,
                **({"tools": tools, "tool_choice": "none"} if number % 5 else {}),
                **common,
            )
            assert choice["finish_reason"] == "stop", (number, choice)
            text = choice["message"]["content"]
        else:
            response = await response_to(
                server,
                text={"format": {"type": "json_schema", **form}},
                reasoning={"effort": effort},
                max_output_tokens=2500,
                **({"tools": [{"type": "function", **TOOL}], "tool_choice": "none"} if number % 5 else {}),
                **common,
            )
            assert response["status"] == "completed", (number, response)
            text = text_of(response)
    assert valid(json.loads(text), schema), (number, text)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_answers_are_valid(client: LocalClient) -> None:
    schemas = fifty()
    assert len(schemas) == 50

    async def main(server: Server) -> None:
        gate = asyncio.Semaphore(64)
        await asyncio.gather(
            *(one(server, number, schemas[number % 50], gate) for number in range(NUM_REQUESTS))
        )

    run(client, main, seconds=1200)
