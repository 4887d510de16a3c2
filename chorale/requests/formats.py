"""The fields for structured output, in every spelling, as one Constraint.

``response_format`` / ``text.format`` (OpenAI), ``structured_outputs`` (vLLM) and its predecessor
``guided_*``. A request may use one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from chorale.errors import invalid, unsupported
from chorale.grammar import constraint as make
from chorale.grammar.constraint import Constraint
from chorale.grammar.matcher import to_lark
from chorale.harmony.messages import ResponseFormat
from chorale.requests.readers import optional_flag, optional_string
from chorale.tracing.ignored import unknown_field

DEFAULT_NAME = "response"
_SCHEMA_KEYS = ("name", "schema", "strict", "description", "type")
_WAYS = ("json", "json_object", "regex", "choice", "grammar")
_TIGHT = "disable_any_whitespace"
# Options of vLLM that are always in effect.
_HARMLESS_OPTIONS = ("disable_fallback", "backend", "_backend")


@dataclass(frozen=True, slots=True)
class Structured:
    """``constraint``: applies to the answer; ``described``: its description in the prompt."""

    constraint: Constraint | None = None
    described: ResponseFormat | None = None


class StructuredFields(Protocol):
    """Constraints of the output under vLLM's new and old names."""

    @property
    def structured_outputs(self) -> dict[str, Any] | None: ...
    @property
    def guided_json(self) -> dict[str, Any] | str | None: ...
    @property
    def guided_regex(self) -> str | None: ...
    @property
    def guided_choice(self) -> list[str] | None: ...
    @property
    def guided_grammar(self) -> str | None: ...


FREE = Structured()


def read_format(value: Mapping[str, Any] | None, param: str) -> Structured:
    """Parses OpenAI's form, with the schema nested (Chat) or flat (Responses). Raises ``RequestError``."""
    if value is None:
        return FREE
    kind = value.get("type", "text")
    if kind == "json_object" and value.get("schema") is not None:  # llama.cpp's form
        check_keys(value, _SCHEMA_KEYS, param)
        return _read_schema(value, param)
    if kind in ("text", "json_object"):
        check_keys([key for key, given in value.items() if given is not None], ("type",), param)
        return FREE if kind == "text" else Structured(make.json_object(param))
    if kind != "json_schema":
        raise unsupported(param, f"type {str(kind)[:64]!r} is not one of text, json_object, json_schema")
    nested = value.get("json_schema", value)
    if nested is not value:
        param = f"{param}.json_schema"
    if not isinstance(nested, Mapping):
        raise invalid(param, "must be an object")
    check_keys(nested, _SCHEMA_KEYS, param)
    return _read_schema(nested, param)


def check_keys(given: Iterable[str], known: Sequence[str], param: str) -> None:
    for key in given:
        if key not in known:
            unknown_field(f"{param}.{key}")


def _read_schema(value: Mapping[str, Any], param: str) -> Structured:
    schema = value.get("schema")
    if not isinstance(schema, Mapping):
        raise invalid(f"{param}.schema", "must be a JSON Schema object")
    name = value.get("name", DEFAULT_NAME)
    if not isinstance(name, str) or not 1 <= len(name) <= 64 or not name.isprintable():
        raise invalid(f"{param}.name", "must be a string of 1 to 64 characters")
    description = optional_string(value, "description", param)
    optional_flag(value, "strict", param)
    constraint = make.json_schema(schema, f"{param}.schema")
    return Structured(constraint, ResponseFormat(name, schema, description))


def read_structured(fields: StructuredFields) -> Constraint | None:
    """Parses ``structured_outputs`` and ``guided_*``."""
    asked: list[tuple[str, Any, str]] = []
    for way, value in (fields.structured_outputs or {}).items():
        param = f"structured_outputs.{way[:64]}"
        if way in _WAYS:
            if value is not None and value is not False:
                asked.append((way, value, param))
        elif way == _TIGHT:
            if not isinstance(value, bool | None):
                raise invalid(param, "must be true or false")
        elif value and way not in _HARMLESS_OPTIONS:
            raise unsupported(param, "is not supported")
    for way in ("json", "regex", "choice", "grammar"):
        value = getattr(fields, f"guided_{way}")
        if value is not None:
            asked.append((way, value, f"guided_{way}"))
    if len(asked) > 1:
        names = ", ".join(param for _, _, param in asked)
        raise invalid(asked[1][2], f"{names} exclude each other")
    if not asked:
        return None
    constraint = constraint_of(*asked[0])
    tight = bool((fields.structured_outputs or {}).get(_TIGHT))
    return replace(constraint, tight=True) if tight and constraint.is_json else constraint


def constraint_of(way: str, value: Any, param: str) -> Constraint:
    """``way``: one of json, json_object, regex, choice, grammar. Raises ``RequestError``."""
    if way == "json":
        return make.json_schema(_schema(value, param), param)
    if way == "json_object":
        return make.json_object(param)
    if way == "choice":
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise invalid(param, "must be a list of strings")
        return make.choice(value, param)
    if not isinstance(value, str):
        raise invalid(param, "must be a string")
    return make.regex(value, param) if way == "regex" else _grammar(value, param)


def _grammar(text: str, param: str) -> Constraint:
    """Returns a Lark grammar, translated if it is GBNF."""
    make.check_size(text, param)
    try:
        return make.lark(to_lark(text), param)
    except ValueError as error:
        raise unsupported(param, str(error)) from None


def _schema(value: Any, param: str) -> Mapping[str, Any]:
    """Returns a JSON Schema, given as an object or as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise invalid(param, "is not JSON") from None
    if not isinstance(value, Mapping):
        raise invalid(param, "must be a JSON Schema object")
    return value


def read_answer(value: Mapping[str, Any] | None, fields: StructuredFields, param: str) -> Structured:
    """Parses both kinds of fields, of which a request may use one. ``value``: of the field ``param``."""
    formatted, other = read_format(value, param), read_structured(fields)
    if other is None:
        return formatted
    if formatted.constraint is not None:
        raise invalid(other.param, f"{other.param} and {param} exclude each other")
    return Structured(other)
