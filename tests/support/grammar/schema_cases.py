"""Schemas from simple to hostile, and an independent validator for the answers.

Everything is bounded or biased towards an end, so that a random model finishes within a few dozen tokens.
"""

from __future__ import annotations

from typing import Any

from chorale.harmony.vocab import END, RETURN, load_vocabulary

VOCAB = load_vocabulary()


def _ids(*texts: str) -> list[int]:
    found = [VOCAB.encode(text) for text in texts]
    return [ids[0] for ids in found if len(ids) == 1]


# A random model rarely closes anything: of 195,614 tokens that are allowed in a string, one in a thousand
# ends it. With these biases it does so after a few tokens.
BIAS: dict[str, float] = {
    **{str(token): 14.0 for token in _ids('"', "}", "]", '"}', "}}", '"]')},
    **{str(token): 11.0 for token in _ids(",", '",', '",\n', '":', ":")},
    str(END): 12.0,
    str(RETURN): 12.0,
}


def obj(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


_NODE = obj(v={"type": "integer"}, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})
_SHAPES = [
    obj(kind={"const": "circle"}, r={"type": "number", "exclusiveMinimum": 0, "maximum": 9.5}),
    obj(kind={"const": "square"}, side={"type": "integer", "minimum": 1, "maximum": 9}),
]
_DEEP: dict[str, Any] = {"type": "boolean"}
for _ in range(24):
    _DEEP = obj(a=_DEEP)
_WORD = {"type": "string", "maxLength": 12}

SCHEMAS: dict[str, dict[str, Any]] = {
    "boolean": obj(ok={"type": "boolean"}),
    "string": obj(city=_WORD),
    "integer": obj(n={"type": "integer", "minimum": -5, "maximum": 1200}),
    "number": obj(x={"type": "number", "minimum": 0.25, "maximum": 0.75}),
    "enum": obj(unit={"enum": ["celsius", "fahrenheit", "kelvin", 'quo"ted', "漢字 😀", "<|end|>", 7, None]}),
    "optional": obj([], a=_WORD, b={"type": "integer"}, c={"type": "boolean"}),
    "array": obj(xs={"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}),
    "tuple": obj(
        t={"type": "array", "prefixItems": [_WORD, {"type": "boolean"}], "items": False, "minItems": 2}
    ),
    "any_of": obj(v={"anyOf": [{"type": "null"}, {"type": "integer"}, obj(w=_WORD)]}),
    "one_of": obj(shape={"oneOf": _SHAPES}),
    "all_of": {"allOf": [obj(["a"], a=_WORD, b=_WORD), {"required": ["b"]}]},
    "recursive": {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
    "pattern": obj(id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "slashes": obj(path={"type": "string", "pattern": '^/[a-z"]{1,3}(/[0-9]+)?$', "maxLength": 12}),
    "formats": obj(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "multiple": obj(k={"type": "integer", "multipleOf": 25, "minimum": 0, "maximum": 1000}),
    "odd_keys": obj(
        **{"a b": {"type": "null"}, 'q"\\': {"type": "null"}, "é漢": {"type": "null"}, "": _WORD}
    ),
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "pattern_keys": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,3}$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "deep": _DEEP,
    "wide": obj(**{f"field_{n}": {"enum": [n, -n]} for n in range(30)}),
    "lengths": obj(
        s={"type": "string", "minLength": 3, "maxLength": 6}, t={"const": {"z": [1, "two", None]}}
    ),
    "anything": {"type": "object"},
}


def valid(value: Any, schema: Any) -> bool:
    """Returns whether ``value`` satisfies the schema, with its formats."""
    from jsonschema import Draft202012Validator, FormatChecker  # 0.2 s, in few of the workers

    return Draft202012Validator(schema, format_checker=FormatChecker(("date", "uuid"))).is_valid(value)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


# Most made another compiler take over ten seconds or loop; here each is answered or refused at once.
NASTY: dict[str, Any] = {
    "enum": {"enum": [f"item {n}" for n in range(4000)]},
    "optional": obj([], **{f"p{n}": {"type": "string"} for n in range(1000)}),
    "deep": nested(31),
    "long": {"type": "string", "maxLength": 1_000_000},
    "many": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
    "cube": {
        "type": "array",
        "minItems": 1000,
        "items": {"type": "array", "minItems": 1000, "items": {"type": "array", "minItems": 1000}},
    },
    "repeats": {"type": "string", "pattern": "^(([a-z]{1,100}){1,100}){1,100}$"},
    "lookback": {"type": "string", "pattern": "(.*a){20}.{50}"},
    "and": {"allOf": [{"type": "string", "pattern": f".*{char}.*"} for char in "abcdefghijkl"]},
    "doubling": {
        "$defs": {
            **{
                f"d{n}": obj(l={"$ref": f"#/$defs/d{n + 1}"}, r={"$ref": f"#/$defs/d{n + 1}"})
                for n in range(30)
            },
            "d30": {"type": "null"},
        },
        "$ref": "#/$defs/d0",
    },
    "product": {
        "allOf": [
            {"anyOf": [obj(**{f"a{row}_{column}": {"type": "null"}}) for column in range(4)]}
            for row in range(8)
        ]
    },
}
