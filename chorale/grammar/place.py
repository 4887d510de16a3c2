"""Where in a JSON Schema the part is that the compiler refuses: its messages name the part, not the place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from chorale.grammar.constraint import NAMED_SCHEMAS, VALUES, Constraint

_MOST = 300  # characters of a path
# The compiler's reasons that name no place, as keywords and a reason that says what to do.
_REASONS = {
    "oneOf constraints are not supported.": (
        ("oneOf",),
        "the alternatives of oneOf may overlap, which cannot be enforced; use anyOf, or alternatives that "
        "differ in their type or in the const of a required property",
    ),
    'min/maxProperties only supported when all keys listed in "properties" are required': (
        ("minProperties", "maxProperties"),
        "minProperties and maxProperties can be enforced only if all properties are required",
    ),
}
_UNKNOWN_KEYS = "Unimplemented keys: "
_FORMATS = "date-time, date, time, duration, email, hostname, ipv4, ipv6, uuid and uri"
_PLAIN = re.compile(r"[\w$-]+")


def explained(constraint: Constraint, reason: str) -> str:
    """Returns the reason why a constraint cannot be used, with its field and, if known, the place in it."""
    places: list[str] = []
    if constraint.is_json:
        every = _keywords(json.loads(constraint.body), "")
        places = [path for path, key, value in every if _names(reason, key, value)]
    # Of several such keywords, the reason may be about any.
    place = "" if not places or (reason in _REASONS and len(places) > 1) else places[0]
    return f"{constraint.param}{place[:_MOST]}: {_words(reason)}"


def _words(reason: str) -> str:
    """Returns the compiler's message in words for the author of a schema."""
    if reason in _REASONS:
        return _REASONS[reason][1]
    if reason.startswith(_UNKNOWN_KEYS):
        return f"{', '.join(json.loads(reason.removeprefix(_UNKNOWN_KEYS)))} cannot be enforced by a grammar"
    return f"{reason} (known: {_FORMATS})" if reason.startswith("Unknown format: ") else reason


def _names(reason: str, key: str, value: Any) -> bool:
    """Returns whether the compiler's message is about this keyword."""
    if reason in _REASONS:
        return key in _REASONS[reason][0]
    if reason.startswith(_UNKNOWN_KEYS):
        return json.dumps(key) in reason
    if key == "format":
        return reason == f"Unknown format: {value}"
    return key == "pattern" and reason.startswith(f"regex parse error: {value}: ")


def _keywords(schema: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yields path, name and value of each keyword in a schema and in the schemas within it."""
    if isinstance(schema, list):
        for position, each in enumerate(schema):
            yield from _keywords(each, f"{path}[{position}]")
    for key, value in schema.items() if isinstance(schema, Mapping) else ():
        own = path + _step(key)
        yield own, key, value
        if key in NAMED_SCHEMAS and isinstance(value, Mapping):
            for name, each in value.items():
                yield from _keywords(each, own + _step(name))
        elif key not in VALUES:
            yield from _keywords(value, own)


def _step(name: str) -> str:
    return f".{name}" if _PLAIN.fullmatch(name) else f"[{json.dumps(name)}]"
