"""A constraint that cannot be enforced gets a 400 that names it.

``e2e/test_faults.py`` sends schemas that are expensive to compile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorale.errors import RequestError
from tests.support.grammar.schema_cases import BIAS, NASTY, nested, obj
from tests.support.grammar.structured import answering
from tests.support.local_client import LocalClient

REFUSED: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "not"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "then"),
    ({"type": "string", "format": "smell"}, "smell"),
    ({"type": "integer", "multipleOf": 999983}, "multipleOf"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    ({"$ref": "http://127.0.0.1:1/schema"}, "127.0.0.1"),
    ({"$ref": "#/$defs/nowhere"}, "nowhere"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "nothing"),
    ({"enum": []}, "empty"),
    ({"items": {"const": -(2**63) + 1}}, "numbers"),  # ended the process
    ({"type": "integer", "minimum": -1e19, "maximum": -1e19}, "numbers"),
    (nested(40), "nested"),
    ({"type": "string", "pattern": "^(([a-z]{1,100}){1,100}){1,100}$"}, "too complex"),
    ({"enum": [f"item {n} {n * 7919:x}" for n in range(20_000)]}, "65536 bytes"),
]


@pytest.mark.parametrize(("schema", "word"), REFUSED, ids=[word for _, word in REFUSED])
async def test_the_error_names_the_unsupported_keyword(client: LocalClient, schema: Any, word: str) -> None:
    async with answering(client) as server:
        form = {"name": "x", "schema": schema}
        # Inside a property, a reference resolves differently, and an impossible optional property may be
        # omitted. The walk that finds a too complex grammar takes only one of many paths.
        inner_is_fine = "$ref" in schema or "enum" in schema or word == "too complex"
        refused = [
            await server.post(
                "/v1/chat/completions",
                messages=[{"role": "user", "content": "hi"}],
                response_format={"type": "json_schema", "json_schema": form},
            ),
            await server.post("/v1/responses", input="x", text={"format": {"type": "json_schema", **form}}),
            await server.post("/v1/completions", prompt="x", guided_json=schema),
            await server.post(
                "/v1/responses",
                input="x",
                max_output_tokens=5,
                tools=[
                    {
                        "type": "function",
                        "name": "f",
                        "parameters": {"type": "object", "properties": {"v": schema}},
                        "strict": True,
                    }
                ],
            ),
        ]
        for status, body in refused[:3] if inner_is_fine else refused:
            assert status == 400, body
            assert word.split()[0].lower() in body["error"]["message"].lower(), body
            assert len(body["error"]["message"]) < 500
            assert body["error"]["code"] in ("unsupported_value", "json_too_deep")
        params = [body["error"]["param"] for _, body in refused[:3]]
        if word != "nested":  # the whole body may be nested too deeply already
            assert params == ["response_format.json_schema.schema", "text.format.schema", "guided_json"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_grammar": "start: <|start|>"}, "guided_grammar"),
        ({"guided_grammar": 'start: "a" <[200006]>'}, "guided_grammar"),
        ({"guided_grammar": "start: nope"}, "guided_grammar"),
        ({"guided_grammar": "root ::= ["}, "guided_grammar"),
        ({"guided_grammar": 'start: %json {"const": -92233720368547758.07e2}'}, "guided_grammar"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"structured_outputs": {"jsn": {}, "regex": "a"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"response_format": {"type": "json_object", "schema": [1]}}, "response_format.schema"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 5}, "min_tokens"),
        ({"guided_regex": "a", "continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_bad_requests_name_their_field(client: LocalClient, fields: dict[str, Any], param: str) -> None:
    async with answering(client) as server:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}]
        status, body = await server.post("/v1/chat/completions", messages=messages, **fields)
        assert (status, body["error"]["param"]) == (400, param), body


NAMES = ["type", "properties", "items", "enum", "const", "anyOf", "allOf", "$ref", "pattern", "required",
         "minimum", "maximum", "minItems", "maxLength", "format", "multipleOf", "$defs"]  # fmt: skip
WORDS = ["object", "array", "string", "integer", "number", "#", "#/$defs/a", "a", "date", "^a$", "("]
NUMBERS = [0, 1, -1, 0.1, 3, 1e308, -1e19, 2**63, -(2**63), 1 - 2**63, 2**70]
VALUES = st.recursive(
    st.sampled_from([None, True, *WORDS, *NUMBERS]),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.sampled_from(NAMES), some, max_size=4),
)
PIECES = ["start: ", "root ::= ", '"a"', "/a/", "[a-z]", "(", ")", "|", "*", "~9", "\n", "%json {", "}",
          "%ignore ", "\\", "^", "(?=", "\\p{L}", "{99999}", '"const": -9223372036854775807']  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=10).map("".join)


@pytest.mark.parametrize("way", ["schema", "tool", "json", "regex", "grammar", "choice"])
def test_any_constraint_is_a_400_or_answered(client: LocalClient, way: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(VALUES if way in ("schema", "tool") else VALUES | TEXTS)
    def check(value: Any) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
        tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": value}}
        fields = {"schema": {"response_format": form}, "tool": {"tools": [tool], "tool_choice": "required"}}
        asked = fields.get(way, {"structured_outputs": {way: value}})
        messages = [{"role": "user", "content": "hi"}]

        async def main() -> None:
            body = {"messages": messages, "max_tokens": 2, "logit_bias": BIAS, **asked}
            async with answering(client) as server:
                response = await server.http.post("/v1/chat/completions", json=body)
            assert response.status_code in (200, 400), (value, response.text)

        asyncio.run(main())

    check()


async def test_a_grammar_is_checked_once(client: LocalClient, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    check = client.check_grammar

    def counted(grammar: str) -> Awaitable[str | None]:
        compiled.append(grammar)
        return check(grammar)

    monkeypatch.setattr(client, "check_grammar", counted)

    async with answering(client) as server:
        for schema, is_good in ((obj(["a"], a={"type": "string"}), True), (NASTY["repeats"], False)):
            form = {"type": "json_schema", "name": "x", "schema": schema}
            compiled.clear()
            for _ in range(3):
                with contextlib.nullcontext() if is_good else pytest.raises(RequestError):
                    await server.state.grammars.check(_constraints(form))
            assert len(compiled) == 1


def _constraints(form: dict[str, Any]) -> list[Any]:
    from chorale.requests.formats import read_format

    return [read_format(form, "text.format").constraint]
