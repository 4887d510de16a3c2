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
