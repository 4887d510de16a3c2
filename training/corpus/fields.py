"""Named values, as JSON schemas declare them and as sentences mention them. Shared by schemas and tools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from training.corpus.base import Draw, Phrases
from training.corpus.links import link
from training.corpus.values import marked, phrase


@dataclass(frozen=True, slots=True)
class Field:
    name: str  # in the schema: guest_count, guestCount, guests
    spoken: str  # in a sentence: guest count
    schema: dict[str, Any]
    value: Any
    shown: str  # the value in a sentence


def spell(draw: Draw, parts: list[str], style: str | None = None) -> str:
    """Joins a few words in snake_case, camelCase or kebab-case."""
    style = style or draw.pick(("snake", "snake", "camel"))
    if style == "camel":
        return parts[0] + "".join(p.title() for p in parts[1:])
    return "_".join(parts)


COMMON_NAMES = (
    "name", "city", "age", "date", "time", "price", "title", "count", "color", "country", "email", "amount", "status",
    "temperature", "condition", "unit", "total", "id", "size", "weight", "rating", "year", "phone", "address", "quantity",
    "location", "message", "language", "currency", "level", "distance", "duration", "category", "score", "humidity",
)  # fmt: skip
KINDS = ("string", "string", "string", "integer", "integer", "number", "boolean", "enum", "marked")
RESULT_KINDS = ("string", "string", "integer", "integer", "number", "marked")


def field(draw: Draw, described: float = 0.5, result: bool = False) -> Field:
    """A field of a random name and type, with a value that a sentence can state."""
    parts = [draw.pick(COMMON_NAMES)] if draw.chance(0.2) else draw.words(2 if draw.chance(0.4) else 1)
    name, spoken = spell(draw, parts), " ".join(parts)
    schema, value, shown = _value(draw, draw.pick(RESULT_KINDS if result else KINDS))
    if draw.chance(described):
        schema = {"type": schema.pop("type"), "description": _description(draw, spoken), **schema}
    return Field(name, spoken, schema, value, shown)


def _value(draw: Draw, kind: str) -> tuple[dict[str, Any], Any, str]:
    if kind == "integer":
        value = draw.integer(0, draw.pick((9, 99, 999, 999, 99999)))
        return {"type": "integer"}, value, str(value)
    if kind == "number":
        value = draw.integer(0, draw.pick((9, 99, 99, 9999))) + draw.pick((10, 10, 100)) ** -1 * draw.integer(
            1, 9
        )
        value = round(value, 2)
        return {"type": "number"}, value, str(value)
    if kind == "boolean":
        value = draw.chance(0.5)
        return (
            {"type": "boolean"},
            value,
            draw.pick(("yes", "true", "on") if value else ("no", "false", "off")),
        )
    if kind == "enum":
        options = draw.words(draw.integer(2, 4))
        value = draw.pick(options)
        return {"type": "string", "enum": options}, value, str(value)
    text = marked(draw) if kind == "marked" else phrase(draw)
    return {"type": "string"}, text, text


def _description(draw: Draw, spoken: str) -> str:
    return str(
        draw.pick(
            (
                "The {s}",
                "The {s}.",
                "{S}",
                "{S} to use",
                "Which {s}",
                "{S} of the request",
                "The {s} to use, optional",
                "Desired {s}",
                "The {s} of the user",
                "{S} (required)",
                "The {s}, e.g. {e}",
                "{S}, for example {e}",
            )
        )
    ).format(s=spoken, S=spoken.capitalize(), e=phrase(draw))


def fields(draw: Draw, count: int, **options: Any) -> list[Field]:
    """Returns ``count`` fields with distinct names."""
    chosen: dict[str, Field] = {}
    while len(chosen) < count:
        candidate = field(draw, **options)
        chosen.setdefault(candidate.name, candidate)
    return list(chosen.values())


_WAYS = Phrases(
    (
        "{s} {v}", "{s}: {v}", "{s} = {v}", "{s} is {v}", "the {s} is {v}", "{s} {v}", "with {s} {v}", "{s} should be {v}",
        "set {s} to {v}", "{s} set to {v}", "{s} must be {v}", "{s} as {v}", "{s} will be {v}", "my {s} is {v}",
        "{s} equals {v}", "use {v} as {s}", "{s} of {v}", "a {s} of {v}", "{s} -> {v}", "set the {s} to {v}", "{s}={v}",
        "make the {s} {v}", "for {s} take {v}", "the {s} {v}", "take {v} as {s}", "{v} as {s}", "{v} as the {s}", "{v} is the {s}",
        "put {v} into {s}", "enter {v} under {s}", "{v} for the {s}", "{v} for {s}", "choose {v} for the {s}", "write {v} as {s}",
        "{v} goes into the {s}", "I choose {v} as my {s}", "take {v} for the {s}", "with {v} as {s}", "give {v} as the {s}",
        "the {s} has to be {v}", "the {s} must be {v}", "our {s} is {v}", "its {s} is {v}", "as {s} take {v}",
        "for the {s} use {v}", "let {s} be {v}", "let the {s} be {v}", "I want {v} as {s}", "the {s} equals {v}", "the {s} was {v}",
        "the {s} shall be {v}", "the {s} can be {v}", "with a {s} of {v}", "where {s} is {v}", "having the {s} {v}",
        "and the {s} is {v}", "set {v} as the {s}", "pass {v} as the {s}", "employ {v} as the {s}", "the {s}: {v}",
        "the {s} = {v}", "{v} ({s})", "{s} ({v})", "the {s} would be {v}", "with the {s} at {v}", "with the {s} set to {v}",
    ),
    ("the {s} should be {v}", "with the {s} {v}", "the {s} will be {v}", "use {v} as the {s}"),
    ("the {s} ought to be {v}", "pick {v} as the {s}", "with {s} being {v}", "I take {v} as the {s}"),
)  # fmt: skip


def mention(draw: Draw, one: Field) -> str:
    """Returns a clause that states the value of a field."""
    shown = f'"{one.shown}"' if quoted(draw, one) else one.shown
    if draw.split == "train" and draw.chance(0.6):
        is_bare = shown.islower() and shown[0].isalpha() and isinstance(one.value, str)
        way = link(draw, is_plain=is_bare and "enum" not in one.schema)
    else:
        way = draw.phrase(_WAYS)
    return way.format(s=one.name if draw.chance(0.15) else one.spoken, v=shown)


def quoted(draw: Draw, one: Field) -> bool:
    return isinstance(one.value, str) and "enum" not in one.schema and draw.chance(0.2)


def schema_of(chosen: list[Field], required: list[str] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {one.name: one.schema for one in chosen},
        "required": [one.name for one in chosen] if required is None else required,
    }


def compact(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))


def join(draw: Draw, clauses: list[str]) -> str:
    if len(clauses) > 1 and draw.chance(0.5):
        return f"{', '.join(clauses[:-1])} and {clauses[-1]}"
    return ", ".join(clauses)
