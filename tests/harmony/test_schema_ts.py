"""The quirks by name (the differential test covers them at random), and that nothing raises."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chorale.harmony.schema_ts import compact_json, schema_to_typescript
from tests.harmony.conversations import schema, value


def members(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "any"),
        ({"type": "object"}, "{\n}"),
        ({"type": "string", "enum": ["a", "b"]}, '"a" | "b"'),
        ({"type": "integer"}, "number"),
        ({"type": "array"}, "Array<any>"),
        ({"type": "array", "items": {"type": "string"}}, "string[]"),
        ({"type": ["integer", "null"]}, "number | null"),
        ({"anyOf": [{"type": "string"}]}, "any"),
        ({"$ref": "#/x"}, "any"),
        ({"const": 1}, "any"),
        ({"enum": ["a"]}, "any"),
        (members(x={"type": "string", "nullable": True}), "{\nx?: string | null,\n}"),
        (members(x={"type": "string", "default": "c"}), '{\nx?: string, // default: "c"\n}'),
        (members(x={"type": "string", "enum": ["c"], "default": "c"}), '{\nx?: "c", // default: c\n}'),
        (members(x={"title": "T", "examples": ["e"]}), '{\n// T\n//\n// Examples:\n// - "e"\nx?: any,\n}'),
        (members(x={"type": "string", "description": "a\nb"}), "{\n// a\nb\nx?: string,\n}"),
        (members(x=members(y={"type": "number"})), "{\nx?: {\n    y?: number,\n    },\n}"),
        (
            members(x={"oneOf": [{"type": "string"}, {"type": "number"}]}),
            "{\nx?:\n | string\n | number\n,\n}",
        ),
    ],
)
def test_quirks_of_openai_harmony_are_kept(given: dict[str, Any], expected: str) -> None:
    assert schema_to_typescript(given) == expected


def test_required_and_described_object() -> None:
    given = members(x={"type": "object", "description": "d"}) | {"required": ["x"]}
    assert schema_to_typescript(given) == "{\n// d\nx:     // d\n{\n    },\n}"


def test_odd_schemas_do_not_raise() -> None:
    deep: dict[str, Any] = {"type": "array"}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    cyclic: dict[str, Any] = members()
    cyclic["properties"]["again"] = cyclic
    odd = [
        None,
        True,
        3,
        "x",
        [],
        deep,
        cyclic,
        {"type": {}},
        {"oneOf": 5},
        {"type": "object", "properties": []},
    ]
    odd += [{"oneOf": [None, 5, {"default": deep}]}, members(x=None, y=5), {"type": "array", "items": None}]
    odd += [{"type": "object", "properties": {5: {"type": "string"}}, "required": [{}]}]
    for given in odd:
        assert isinstance(schema_to_typescript(given), str)
    assert schema_to_typescript(deep).startswith("any[]")
    rng = random.Random(0)
    for _ in range(5000):
        schema_to_typescript(rng.choice([schema, value])(rng))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"a": [1, 2.0, None, True]}, '{"a":[1,2.0,null,true]}'),
        (1e20, "1e20"),
        (-2.5e-5, "-0.000025"),
        (3.25e-7, "3.25e-7"),
        (1e15, "1000000000000000.0"),
        (float("nan"), "null"),
        ("é\n", '"é\\n"'),
        ({1: {2}}, '{"1":"{2}"}'),
    ],
)
def test_compact_json(given: Any, expected: str) -> None:
    assert compact_json(given) == expected
