"""Where in a JSON Schema the part is that the compiler refuses: its messages name the part, not the place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from chorale.grammar.constraint import NAMED_SCHEMAS, VALUES, Constraint

_MOST = 300  # characters of a path
_PLAIN = re.compile(r"[\w$-]+")


def explained(constraint: Constraint, reason: str) -> str:
    """Returns the reason why a constraint cannot be used, with its field and, if known, the place in it."""
    place = ""
    if constraint.is_json:
        found = (
            path
            for path, key, value in _keywords(json.loads(constraint.body), "")
            if _names(reason, key, value)
        )
        place = next(found, "")
    return f"{constraint.param}{place[:_MOST]}: {reason}"


def _names(reason: str, key: str, value: Any) -> bool:
    """Returns whether the compiler's message is about this keyword."""
    if reason.startswith("Unimplemented keys: "):
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
