"""Converts JSON Schema to the TypeScript that the model was trained to read in tool descriptions.

The output is byte-identical to that of openai-harmony 0.0.8, quirks included, because that is the best
evidence of the training format: ``anyOf``, ``$ref``, ``const`` and enums without a type are printed as
``any``; numeric bounds and patterns are omitted; only the first line of a multi-line description is marked
as a comment; the description of a nested object begins on the line of its name. Odd input (a schema that is
not an object, keywords of the wrong type) is treated as openai-harmony treats it: nothing here raises.
Nesting beyond ``MAX_DEPTH`` is printed as ``any``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 64

_SIMPLE_TYPES = {"number": "number", "integer": "number", "boolean": "boolean"}


def schema_to_typescript(schema: Any, indent: str = "", depth: int = 0) -> str:
    """Return the type expression of ``schema``. Its lines after the first begin with ``indent``."""
    if depth > MAX_DEPTH or not isinstance(schema, Mapping):
        return "any"
    if isinstance(variants := schema.get("oneOf"), list | tuple):
        return _union(variants, indent, depth)
    kind = schema.get("type")
    if isinstance(kind, list | tuple):
        names = ["number" if k == "integer" else k for k in kind if isinstance(k, str)]
        return " | ".join(names) if names else "any"
    if kind == "object":
        return _object(schema, indent, depth)
    if kind == "string":
        return _string(schema)
    if kind == "array":
        if "items" not in schema:
            return "Array<any>"
        return schema_to_typescript(schema["items"], indent, depth + 1) + "[]"
    return _SIMPLE_TYPES.get(kind, "any") if isinstance(kind, str) else "any"


def _string(schema: Mapping[str, Any]) -> str:
    values = schema.get("enum")
    if isinstance(values, list | tuple):
        names = [f'"{value}"' for value in values if isinstance(value, str)]
        if names:
            return " | ".join(names)
    return "string"


def _union(variants: list[Any] | tuple[Any, ...], indent: str, depth: int) -> str:
    """Return the type of a ``oneOf`` that is not directly under a property: one line per variant.

    Only here is the default of a string enum printed as JSON.
    """
    lines = []
    for variant in variants:
        comments = [text for text in (_text(variant, "description"),) if text is not None]
        if (default := _default(variant)) is not None:
            is_bare = _has_enum(variant) and isinstance(variant["default"], str)
            comments.append(f"default: {compact_json(variant['default']) if is_bare else default}")
        lines.append(f"\n{indent} | " + _nullable(variant, f"{indent}   ", depth) + _trailing(comments))
    return "".join(lines)


def _nullable(schema: Any, indent: str, depth: int) -> str:
    """Return the type of ``schema``, with ``| null`` if it is nullable and its type does not contain null."""
    text = schema_to_typescript(schema, indent, depth + 1)
    if isinstance(schema, Mapping) and schema.get("nullable") is True and "null" not in text:
        return f"{text} | null"
    return text


def _object(schema: Mapping[str, Any], indent: str, depth: int) -> str:
    out = []
    if (description := _text(schema, "description")) is not None:
        out.append(f"{indent}// {description}\n")
    out.append("{\n")
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        required = schema.get("required")
        needed = {r for r in required if isinstance(r, str)} if isinstance(required, list | tuple) else set()
        for key, value in properties.items():
            name = f"{key}" if key in needed else f"{key}?"
            out.extend(_property(name, value, indent, depth))
    out.append(f"{indent}}}")
    return "".join(out)


def _property(name: str, schema: Any, indent: str, depth: int) -> Iterator[str]:
    """Yield the lines of one member: comments, then ``name: type,``."""
    if (title := _text(schema, "title")) is not None:
        yield f"{indent}// {title}\n{indent}//\n"
    is_union = isinstance(schema, Mapping) and "oneOf" in schema
    description = _text(schema, "description")
    if description is not None and not is_union:
        yield f"{indent}// {description}\n"
    yield from _examples(schema, indent)
    if is_union and isinstance(schema["oneOf"], list | tuple):
        yield from _union_property(name, schema, indent, depth)
        return
    yield f"{indent}{name}: {_nullable(schema, f'{indent}    ', depth)},"
    default = _default(schema)
    if default is not None and not is_union:
        yield f" // default: {default}"
    yield "\n"


def _examples(schema: Any, indent: str) -> Iterator[str]:
    examples = schema.get("examples") if isinstance(schema, Mapping) else None
    if isinstance(examples, list | tuple) and examples:
        yield f"{indent}// Examples:\n"
        for example in examples:
            if isinstance(example, str):
                yield f'{indent}// - "{example}"\n'


def _union_property(name: str, schema: Mapping[str, Any], indent: str, depth: int) -> Iterator[str]:
    """Yield the lines of a member whose schema is a ``oneOf``: the variants below the name, each followed by
    its comments."""
    variants = schema["oneOf"]
    description = _text(schema, "description")
    is_repeated = bool(variants) and description == _text(variants[0], "description")
    is_above = description is not None and not is_repeated
    if is_above:
        yield f"{indent}// {description}\n"
    if (default := _default(schema)) is not None:
        yield f"{indent}// default: {default}\n"
    yield f"{indent}{name}:\n"
    for index, variant in enumerate(variants):
        comments = []
        own = _text(variant, "description")
        if own is not None and own != description and not (index == 0 and is_above):
            comments.append(own)
        if (default := _default(variant)) is not None:
            comments.append(f"default: {default}")
        yield f"{indent} | {_nullable(variant, f'{indent}   ', depth)}{_trailing(comments)}\n"
    yield f"{indent},\n"


def _text(schema: Any, key: str) -> str | None:
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, str) else None


def _trailing(comments: list[str]) -> str:
    return f" // {' '.join(comments)}" if comments else ""


def _default(schema: Any) -> str | None:
    """Return the printed default, or None. Strings are quoted but not escaped, and not quoted if the schema
    has an enum; other values are JSON."""
    if not isinstance(schema, Mapping) or "default" not in schema:
        return None
    value = schema["default"]
    if not isinstance(value, str):
        return compact_json(value)
    return value if _has_enum(schema) else f'"{value}"'


def _has_enum(schema: Mapping[str, Any]) -> bool:
    values = schema.get("enum")
    return isinstance(values, list | tuple) and len(values) > 0


def compact_json(value: Any, depth: int = 0) -> str:
    """Encode ``value`` as JSON without spaces and without escaping non-ASCII text; floats as Rust prints
    them. Never raises."""
    if depth > MAX_DEPTH:
        return "null"
    if isinstance(value, Mapping):
        members = (f"{_json_string(str(k))}:{compact_json(v, depth + 1)}" for k, v in value.items())
        return "{" + ",".join(members) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(compact_json(v, depth + 1) for v in value) + "]"
    if isinstance(value, float):
        return _json_float(value)
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    return _json_string(str(value))


def _json_string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json_float(value: float) -> str:
    """Return the shortest digits, with an exponent below 1e-5 and from 1e16 on, which has no plus sign and no
    leading zeros."""
    if not math.isfinite(value):
        return "null"
    mantissa, _, exponent = repr(value).partition("e")
    if not exponent:
        return mantissa
    if int(exponent) == -5:
        digits = mantissa.lstrip("-").replace(".", "")
        return f"{'-' if value < 0 else ''}0.0000{digits}"
    return f"{mantissa}e{int(exponent)}"
