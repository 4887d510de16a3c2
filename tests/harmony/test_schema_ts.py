"""Odd schemas raise no error; JSON is written as in Rust. ``test_render_oracle`` has the other cases."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chorale.harmony.schema_ts import compact_json, schema_to_typescript
from tests.harmony.conversations import schema, value


def members(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


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
