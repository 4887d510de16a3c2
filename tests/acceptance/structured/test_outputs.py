"""Every answer satisfies its schema, whatever the endpoint, the effort, the stream or the tools.

The long version (1,000 requests) is ``test_structured_thousand.py``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.grammar.schema_cases import BIAS, SCHEMAS, obj, valid
from tests.support.grammar.structured import choose, response_to, run, text_of
from tests.support.local_client import LocalClient
from tests.support.server import VOCAB, Server

TOOL = {"name": "look_up", "description": "Look it up.", "parameters": obj(q={"enum": ["a", "b"]})}
CHAT_TOOL = {"type": "function", "function": TOOL}
EFFORTS = ("low", "medium", "high")


async def ask_chat(server: Server, name: str, number: int, **fields: Any) -> str:
    answer = {"name": name, "schema": SCHEMAS[name], "strict": bool(number % 3)}
    choice = await choose(
        server,
        f"question {number}",
        response_format={"type": "json_schema", "json_schema": answer},
        reasoning_effort=EFFORTS[number % 3],
        temperature=1,
        seed=number,
        logit_bias=BIAS,
        max_tokens=1500,
        **fields,
    )
    assert choice["finish_reason"] == "stop", (name, choice)
    text: str = choice["message"]["content"]
    return text


async def ask_responses(server: Server, name: str, number: int, **fields: Any) -> str:
    answer = {"type": "json_schema", "name": name, "schema": SCHEMAS[name], "strict": bool(number % 2)}
    response = await response_to(
        server,
        f"question {number}",
        text={"format": answer},
        reasoning={"effort": EFFORTS[number % 3]},
        seed=number,
        temperature=1,
        logit_bias=BIAS,
        max_output_tokens=1500,
        **fields,
    )
    assert response["status"] == "completed", (name, response)
    assert response["text"]["format"]["schema"] == SCHEMAS[name]
    return text_of(response)


def check_answers(client: LocalClient, *, swapped: bool, streams: Callable[[int], bool]) -> None:
    """An answer to each schema. ``swapped``: by the other endpoint; ``streams``: whether the n-th streams."""

    async def main(server: Server) -> None:
        work = []
        for number, name in enumerate(SCHEMAS):
            fields: dict[str, Any] = {"stream": streams(number)}
            if number % 3:
                fields["tool_choice"] = "none"
            if number % 2 == swapped:
                fields["tools"] = [CHAT_TOOL] if number % 3 else []
                work.append(ask_chat(server, name, number, **fields))
            else:
                fields["tools"] = [{"type": "function", **TOOL}] if number % 3 else []
                work.append(ask_responses(server, name, number, **fields))
        answers = await asyncio.gather(*work)
        for name, text in zip(SCHEMAS, answers, strict=True):
            assert valid(json.loads(text), SCHEMAS[name]), (name, text)
            assert not any(VOCAB.is_special(token) for token in VOCAB.encode_with_special(text)) or (
                name == "enum"  # one of its members spells a special token, as text
            )

    run(client, main)


def test_every_answer_satisfies_its_schema(client: LocalClient) -> None:
    """Each schema once: chat and responses, streamed and not, have a quarter each."""
    check_answers(client, swapped=False, streams=lambda number: number // 2 % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_satisfies_its_schema_in_every_way(
    client: LocalClient, swapped: bool, stream: bool
) -> None:
    check_answers(client, swapped=swapped, streams=lambda number: stream)


def test_a_tool_may_be_called_before_the_answer(client: LocalClient) -> None:
    """With tools on offer the turn is a call or a valid answer; over seeds both happen."""

    async def one(server: Server, seed: int) -> str:
        choice = await choose(
            server,
            tools=[CHAT_TOOL | {"function": {**TOOL, "strict": True}}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["enum"]}},
            seed=seed,
            logit_bias=BIAS,
            max_tokens=600,
        )
        if choice["finish_reason"] == "tool_calls":
            (made,) = choice["message"]["tool_calls"]
            assert valid(json.loads(made["function"]["arguments"]), TOOL["parameters"])
        else:
            assert valid(json.loads(choice["message"]["content"]), SCHEMAS["enum"])
        return str(choice["finish_reason"])

    async def main(server: Server) -> None:
        found = await asyncio.gather(*(one(server, seed) for seed in range(8)))
        assert set(found) == {"stop", "tool_calls"}

    run(client, main)


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMAS["enum"]}},
            lambda t: valid(json.loads(t), SCHEMAS["enum"]),
        ),
        ({"guided_json": json.dumps(SCHEMAS["tuple"])}, lambda t: valid(json.loads(t), SCHEMAS["tuple"])),
        ({"structured_outputs": {"json": SCHEMAS["enum"]}}, lambda t: valid(json.loads(t), SCHEMAS["enum"])),
        ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
        (
            {"guided_choice": ["yes", "no", 'a "b"\\\n', "是"]},
            lambda t: t in ("yes", "no", 'a "b"\\\n', "是"),
        ),
        ({"structured_outputs": {"regex": "^[a-c]{2}/\\d/$"}}, lambda t: t[2] == t[4] == "/" and len(t) == 5),
        ({"guided_regex": "a|b\nc"}, lambda text: text in ("a", "b\nc")),
        ({"guided_grammar": 'start: "<" WORD ">"\nWORD: /[a-z]/'}, lambda t: t[0] + t[2] == "<>"),
        ({"guided_grammar": 'root ::= "x" ("y" | "z")'}, lambda text: text in ("xy", "xz")),
    ],
)
def test_every_way_of_asking(client: LocalClient, fields: dict[str, Any], check: Any) -> None:
    common = {"logit_bias": BIAS, "max_tokens": 800, "seed": 3}

    async def main(server: Server) -> None:
        choice = await choose(server, **fields, **common)
        assert choice["finish_reason"] == "stop"
        assert check(choice["message"]["content"]), choice
        status, body = await server.post("/v1/completions", prompt="x:", n=3, **fields, **common)
        assert status == 200, body
        for each in body["choices"]:
            assert each["finish_reason"] == "stop"
            assert check(each["text"]), each

    run(client, main)


def test_disable_any_whitespace_leaves_no_blank(client: LocalClient) -> None:
    schema = obj(a={"type": "boolean"}, b={"type": "array", "items": {"type": "boolean"}, "maxItems": 2})
    blanks = {str(VOCAB.encode(text)[0]): 100.0 for text in (" ", "\n")}
    common = {"logit_bias": {**BIAS, **blanks}, "max_tokens": 400, "seed": 3}

    async def main(server: Server) -> None:
        async def one(tight: bool) -> str:
            asked = {"json": schema, "disable_any_whitespace": tight}
            _, body = await server.post("/v1/completions", prompt="x:", structured_outputs=asked, **common)
            text: str = body["choices"][0]["text"]
            assert valid(json.loads(text), schema)
            return text

        assert " " in await one(False)
        text = await one(True)
        assert text == json.dumps(json.loads(text), separators=(",", ":"))

    run(client, main)


def test_the_schema_is_told_to_the_model(client: LocalClient) -> None:
    async def main(server: Server) -> None:
        form = {"name": "weather", "description": "Of a city.", "schema": SCHEMAS["string"]}
        _, body = await server.post(
            "/tokenize",
            messages=[{"role": "user", "content": "hi"}],
            response_format={"type": "json_schema", "json_schema": form},
        )
        text = VOCAB.decode(body["tokens"])
        assert "# Response Formats\n\n## weather\n\n// Of a city.\n" in text

    run(client, main)


def test_reasoning_never_eats_the_answer(client: LocalClient) -> None:
    """Without a bias the random model never ends its reasoning; an answer that is demanded comes anyway."""

    async def main(server: Server) -> None:
        async def one(seed: int) -> None:
            choice = await choose(
                server,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMAS["boolean"]},
                },
                seed=seed,
                max_tokens=100,
            )
            assert choice["finish_reason"] == "stop"
            assert valid(json.loads(choice["message"]["content"]), SCHEMAS["boolean"])

        await asyncio.gather(*(one(seed) for seed in range(8)))

    run(client, main)


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_thinking_budget_closes_the_reasoning(client: LocalClient, budget: int) -> None:
    async def main(server: Server) -> None:
        async def one(seed: int) -> int:
            fields = {"thinking_token_budget": budget, "seed": seed, "logit_bias": {"200002": 14}}
            response = await response_to(server, max_output_tokens=200, **fields)
            assert response["status"] == "completed"
            assert text_of(response)
            return int(response["usage"]["output_tokens_details"]["reasoning_tokens"])

        used = await asyncio.gather(*(one(seed) for seed in range(8)))
        assert max(used) == budget  # the model would go on for ever

    run(client, main)
