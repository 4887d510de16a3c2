"""Every answer satisfies its schema, for every API and effort, streamed or not, with or without tools."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.faces import WAYS, ask
from tests.support.grammar.schema_cases import BIAS, SCHEMAS, obj, valid
from tests.support.grammar.structured import answering
from tests.support.local_client import LocalClient
from tests.support.server import VOCAB, Server

TOOL = {"name": "look_up", "description": "Look it up.", "parameters": obj(q={"enum": ["a", "b"]})}
EFFORTS = ("low", "medium", "high")


def asking_for(face: str, schema: Any, number: int) -> dict[str, Any]:
    """Returns the fields of an API that ask for an answer in the schema."""
    effort, is_strict = EFFORTS[number % 3], bool(number % 3)
    named = {"name": "answer", "schema": schema, "strict": is_strict}
    if face == "chat":
        form = {"type": "json_schema", "json_schema": named}
        return {"response_format": form, "reasoning_effort": effort}
    if face == "responses":
        return {"text": {"format": {"type": "json_schema", **named}}, "reasoning": {"effort": effort}}
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": effort}}


async def check_answer(server: Server, way: tuple[str, bool], schema: Any, number: int) -> None:
    """Checks the answer to one request, with or without a tool that must not be called."""
    face, stream = way
    fields = asking_for(face, schema, number) | {"temperature": 1, "seed": number, "logit_bias": BIAS}
    fields |= {"functions": [TOOL], "choice": "none"} if number % 5 else {}
    answer = await ask(server, face, stream, history=(f"question {number}",), max_tokens=2500, **fields)
    assert answer.finish == "stop", (number, answer)
    assert answer.calls == []
    assert valid(json.loads(answer.text), schema), (number, answer.text)
    if "<|end|>" not in json.dumps(schema):  # a member of an enum is the text of a special token
        assert not any(VOCAB.is_special(token) for token in VOCAB.encode_with_special(answer.text))


async def test_every_answer_satisfies_its_schema(client: LocalClient) -> None:
    """Each schema is used once; every API, streamed and not, gets a sixth of them."""
    async with answering(client) as server:
        ways = itertools.cycle(WAYS)
        work = [check_answer(server, next(ways), schema, n) for n, schema in enumerate(SCHEMAS.values())]
        await asyncio.gather(*work)


def fifty() -> list[dict[str, Any]]:
    """Returns the cases, and objects that combine two of them."""
    simple = [schema for name, schema in SCHEMAS.items() if name not in ("recursive", "anything")]
    pairs = [obj(first=a, second=b) for a, b in itertools.pairwise(simple)]
    triples = [obj(x={"type": "array", "items": schema, "minItems": 1, "maxItems": 2}) for schema in simple]
    return [*SCHEMAS.values(), *pairs, *triples][:50]


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_thousand_answers_are_valid(client: LocalClient) -> None:
    """50 schemas, about four minutes on one core."""
    schemas, gate = fifty(), asyncio.Semaphore(64)
    assert len(schemas) == 50

    async with answering(client) as server:

        async def one(number: int) -> None:
            async with gate:
                await check_answer(server, WAYS[number // 50 % len(WAYS)], schemas[number % 50], number)

        await asyncio.gather(*(one(number) for number in range(1000)))


async def test_a_tool_may_be_called_before_the_answer(client: LocalClient) -> None:
    """With tools the turn is a call or a valid answer; both occur over the seeds."""

    async def one(server: Server, seed: int) -> str:
        fields = asking_for("chat", SCHEMAS["enum"], seed) | {"seed": seed, "logit_bias": BIAS}
        answer = await ask(server, "chat", functions=[TOOL | {"strict": True}], max_tokens=600, **fields)
        if answer.finish == "tool_calls":
            [(_, arguments)] = answer.calls
            assert valid(json.loads(arguments), TOOL["parameters"])
        else:
            assert valid(json.loads(answer.text), SCHEMAS["enum"])
        return answer.finish

    async with answering(client) as server:
        found = await asyncio.gather(*(one(server, seed) for seed in range(8)))
    assert set(found) == {"stop", "tool_calls"}


ASKED: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMAS["enum"]}},
        lambda text: valid(json.loads(text), SCHEMAS["enum"]),
    ),
    ({"guided_json": json.dumps(SCHEMAS["tuple"])}, lambda text: valid(json.loads(text), SCHEMAS["tuple"])),
    (
        {"structured_outputs": {"json": SCHEMAS["enum"]}},
        lambda text: valid(json.loads(text), SCHEMAS["enum"]),
    ),
    ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
    (
        {"guided_choice": ["yes", "no", 'a "b"\\\n', "是"]},
        lambda text: text in ("yes", "no", 'a "b"\\\n', "是"),
    ),
    ({"structured_outputs": {"regex": "^[a-c]{2}/\\d/$"}}, lambda t: t[2] == t[4] == "/" and len(t) == 5),
    ({"guided_regex": "a|b\nc"}, lambda text: text in ("a", "b\nc")),
    ({"guided_grammar": 'start: "<" WORD ">"\nWORD: /[a-z]/'}, lambda text: text[0] + text[2] == "<>"),
    ({"guided_grammar": 'root ::= "x" ("y" | "z")'}, lambda text: text in ("xy", "xz")),
]


async def test_every_constraint_field_is_enforced(client: LocalClient) -> None:
    """All constraint fields work in chats and in raw completions."""
    common = {"logit_bias": BIAS, "max_tokens": 800, "seed": 3}

    async with answering(client) as server:
        chats = await asyncio.gather(*(ask(server, "chat", **fields, **common) for fields, _ in ASKED))
        raw = await asyncio.gather(
            *(server.post("/v1/completions", prompt="x:", **fields, **common) for fields, _ in ASKED)
        )
        for (fields, check), answer, (status, body) in zip(ASKED, chats, raw, strict=True):
            assert (answer.finish, status) == ("stop", 200), (fields, answer, body)
            assert [choice["finish_reason"] for choice in body["choices"]] == ["stop"], (fields, body)
            for text in (answer.text, *(choice["text"] for choice in body["choices"])):
                assert check(text), (fields, text)


async def test_disable_any_whitespace_leaves_no_blank(client: LocalClient) -> None:
    schema = obj(a={"type": "boolean"}, b={"type": "array", "items": {"type": "boolean"}, "maxItems": 2})
    blanks = {str(VOCAB.encode(text)[0]): 100.0 for text in (" ", "\n")}
    common = {"logit_bias": {**BIAS, **blanks}, "max_tokens": 400, "seed": 3}

    async with answering(client) as server:

        async def one(tight: bool) -> str:
            asked = {"json": schema, "disable_any_whitespace": tight}
            _, body = await server.post("/v1/completions", prompt="x:", structured_outputs=asked, **common)
            text: str = body["choices"][0]["text"]
            assert valid(json.loads(text), schema)
            return text

        assert " " in await one(False)
        text = await one(True)
        assert text == json.dumps(json.loads(text), separators=(",", ":"))


async def test_the_prompt_contains_the_schema(client: LocalClient) -> None:
    async with answering(client) as server:
        form = {"name": "weather", "description": "Of a city.", "schema": SCHEMAS["string"]}
        _, body = await server.post(
            "/tokenize",
            messages=[{"role": "user", "content": "hi"}],
            response_format={"type": "json_schema", "json_schema": form},
        )
        text = VOCAB.decode(body["tokens"])
        assert "# Response Formats\n\n## weather\n\n// Of a city.\n" in text


async def test_reasoning_never_eats_the_answer(client: LocalClient) -> None:
    """The random model without a bias never ends its reasoning; a demanded answer comes all the same."""
    async with answering(client) as server:

        async def one(seed: int) -> None:
            fields = asking_for("chat", SCHEMAS["boolean"], seed)
            answer = await ask(server, "chat", seed=seed, max_tokens=100, **fields)
            assert answer.finish == "stop"
            assert valid(json.loads(answer.text), SCHEMAS["boolean"])

        await asyncio.gather(*(one(seed) for seed in range(4)))


async def test_the_thinking_budget_closes_the_reasoning(client: LocalClient) -> None:
    async with answering(client) as server:

        async def one(budget: int, seed: int) -> int:
            fields = {"thinking_token_budget": budget, "seed": seed, "logit_bias": {"200002": 14}}
            answer = await ask(server, "responses", max_tokens=200, **fields)
            assert answer.finish == "stop"
            assert answer.text
            return answer.num_reasoning

        for budget in (0, 1, 7):
            used = await asyncio.gather(*(one(budget, seed) for seed in range(4)))
            assert max(used) == budget  # the model never ends by itself
