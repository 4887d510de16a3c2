"""What of a schema is written differently for the compiler: its references, and nothing else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from chorale.errors import RequestError
from chorale.grammar import checker
from chorale.grammar.checker import GrammarChecker
from chorale.grammar.constraint import MAX_BYTES, MAX_DEPTH, check_size, json_object, json_schema, regex
from chorale.grammar.frames import raw_grammar
from chorale.grammar.matcher import check_constraint, compile_grammar
from chorale.harmony.vocab import load_vocabulary


def accepts(schema: dict[str, Any], text: str) -> bool:
    constraint = json_schema(schema, "p")
    check_constraint(constraint)
    matcher = compile_grammar(raw_grammar(constraint))
    tokens = load_vocabulary().encode(text)
    return matcher.validate_tokens(tokens) == len(tokens)


@pytest.mark.parametrize("name", ["住所", "Größe", "list of int", "List[int]", "Map<string>", "a%20b"])
def test_a_definition_may_have_any_name(name: str) -> None:
    """As a client's library writes the reference: with the name as it is, or escaped as in an address."""
    schema = {"$ref": f"#/$defs/{name}", "$defs": {name.replace("%20", " "): {"type": "boolean"}}}
    assert accepts(schema, "true")
    assert not accepts(schema, "7")


def nested(depth: int) -> dict[str, Any]:
    """Objects within objects; the innermost one has a number."""
    schema: dict[str, Any] = {"type": "number"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_the_bound_of_nested_objects_is_exact() -> None:
    json_schema(nested(MAX_DEPTH), "p")
    with pytest.raises(RequestError, match=f"deeper than {MAX_DEPTH} objects"):
        json_schema(nested(MAX_DEPTH + 1), "p")


def test_an_id_may_be_a_title() -> None:
    inner = {"type": "object", "properties": {"a": {"$ref": "#/definitions/é"}}, "required": ["a"]}
    assert accepts({"$id": "My Schema", **inner, "definitions": {"é": {"type": "null"}}}, '{"a":null}')


def test_references_are_found_wherever_schemas_stand() -> None:
    reference = {"$ref": "#/$defs/名"}
    places: list[dict[str, Any]] = [
        {"anyOf": [{"type": "null"}, {"type": "array", "items": reference, "minItems": 1}]},
        {"type": "array", "prefixItems": [reference], "minItems": 1},
    ]
    for place in places:
        assert accepts({**place, "$defs": {"名": {"const": 5}}}, "[5]")
    # Names of properties that spell keywords are names.
    spelled = {"type": "object", "properties": {"const": reference, "$ref": reference}, "required": ["const"]}
    assert accepts({**spelled, "$defs": {"名": {"const": 5}}}, '{"const":5,"$ref":5}')


def test_values_are_left_as_they_are() -> None:
    value = {"$ref": "#/住 所", "$id": "a b"}
    assert accepts({"const": value}, json.dumps(value, ensure_ascii=False))
    assert accepts({"enum": [value]}, json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize(
    ("pattern", "text"), [("^a$", "a"), ("a\\$", "a$"), ("^5\\$$", "5$"), ("a/b", "a/b")]
)
def test_anchors_go_and_what_is_escaped_stays(pattern: str, text: str) -> None:
    constraint = regex(pattern, "p")
    check_constraint(constraint)
    tokens = load_vocabulary().encode(text)
    assert compile_grammar(raw_grammar(constraint)).validate_tokens(tokens) == len(tokens)


def test_the_checker_counts_what_it_compiles_and_not_what_it_has_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checker, "MAX_PENDING", 2)

    async def main() -> None:
        own = GrammarChecker()
        try:
            for pattern in ("a", "b", "c"):
                await own.check([regex(pattern, "p")])
                with pytest.raises(RequestError):
                    await own.check([regex(pattern + "(", "p")])
            await own.check([json_object("p")])
        finally:
            own.close()

    asyncio.run(main())


def nested_lists(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(count):
        schema = {"items": schema}
    return schema


def test_the_bound_on_depth_is_one_number() -> None:
    """32 objects, each in the ``properties`` of the one around it, are as deep as 65 lists."""
    json_schema(nested_lists(65), "p")
    with pytest.raises(RequestError, match="deeper than 32 objects"):
        json_schema(nested_lists(66), "p")


@pytest.mark.parametrize("text", ["a\ud800", "\udc00", "x" * (MAX_BYTES + 1), "é" * (MAX_BYTES // 2 + 1)])
def test_a_text_that_cannot_be_compiled_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_size(text, "field")
    assert refused.value.param == "field"


def test_a_text_of_the_largest_size_is_not_refused() -> None:
    check_size("é" * (MAX_BYTES // 2), "field")
