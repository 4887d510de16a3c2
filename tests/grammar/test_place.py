"""A schema that cannot be enforced is refused with the place of the part that the compiler refuses."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.grammar.constraint import json_schema
from chorale.grammar.matcher import check_constraint
from chorale.grammar.place import explained

BAD: dict[str, dict[str, Any]] = {
    ".pattern": {"type": "string", "pattern": "(?=x)y"},
    ".format": {"type": "string", "format": "tea"},
    ".items.not": {"type": "array", "items": {"not": {"type": "null"}}},
    ".anyOf[1].pattern": {"anyOf": [{"pattern": "a", "type": "string"}, {"type": "string", "pattern": "("}]},
}


@pytest.mark.parametrize("place", BAD)
def test_the_message_has_the_place(place: str) -> None:
    properties = {"not": {"type": "string", "enum": ["(", "tea"]}, "a b": BAD[place]}
    constraint = json_schema({"type": "object", "properties": properties}, "format.schema")
    with pytest.raises(ValueError, match=r"parse error|Unknown|Unimplemented") as caught:
        check_constraint(constraint)
    said = explained(constraint, str(caught.value))
    assert said.startswith(f'format.schema.properties["a b"]{place}: ')


def test_without_a_known_place_the_field_is_named() -> None:
    constraint = json_schema({"type": "object"}, "format.schema")
    assert explained(constraint, "too complex: x") == "format.schema: too complex: x"


OVERLAP = {"oneOf": [{"type": "number"}, {"type": "integer"}]}
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    ".properties.a.oneOf": ({"a": OVERLAP}, "oneOf"),
    "": ({"a": OVERLAP, "b": {"oneOf": [{"type": "string"}, {"type": "null"}]}}, "oneOf"),
    ".properties.a.minProperties": ({"a": {"properties": {"b": {}}, "minProperties": 1}}, "minProperties"),
    ".properties.a.uniqueItems": ({"a": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ".properties.a.format": ({"a": {"type": "string", "format": "iri"}}, "date-time"),
}


@pytest.mark.parametrize("place", REASONS)
def test_the_message_says_which_keyword_and_where_unless_that_is_unknown(place: str) -> None:
    properties, word = REASONS[place]
    constraint = json_schema({"type": "object", "properties": properties}, "s")
    with pytest.raises(ValueError, match=r"(?i)constraints|properties|keys|format") as caught:
        check_constraint(constraint)
    at, _, reason = explained(constraint, str(caught.value)).partition(": ")
    assert at == f"s{place}"
    assert word in reason


@pytest.mark.parametrize(
    "keyword",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"uniqueItems": {"const": False}}, "unevaluatedProperties": True},
        {"type": "object", "dependentRequired": {}, "dependentSchemas": {}},
        {"oneOf": [{"type": "string", "format": "date"}, {"type": "integer"}]},
    ],
)
def test_keywords_that_restrict_nothing_are_accepted(keyword: dict[str, Any]) -> None:
    constraint = json_schema({"type": "object", "properties": {"a": keyword}}, "s")
    check_constraint(constraint)
    assert '"uniqueItems":false' not in constraint.body
