"""``json_schema``: the answer is JSON that is valid against a schema, and perhaps equal to a value."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from chorale.errors import ConfigError
from chorale_evals.graders.regex import SECONDS, compiled
from chorale_evals.graders.text import MAX_CHARS, fences
from chorale_evals.graders.verdict import Verdict

_ABSENT: Any = object()


def require() -> None:
    """Raises ``ConfigError`` if the package that validates is missing."""
    if importlib.util.find_spec("jsonschema") is None:
        raise ConfigError("the grader json_schema needs the package jsonschema: pip install jsonschema")


def check_schema(schema: Any) -> None:
    """Raises ``ValueError`` for an invalid schema, or one that refers to another document."""
    require()
    import jsonschema  # type: ignore[import-untyped]

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from None
    if _refers_outside(schema):
        raise ValueError("a $ref of the schema leads out of it")


def _refers_outside(value: Any) -> bool:
    if isinstance(value, dict):
        reference = value.get("$ref", "#")
        outside = isinstance(reference, str) and not reference.startswith("#")
        return outside or any(map(_refers_outside, value.values()))
    return isinstance(value, list) and any(map(_refers_outside, value))


def grade(text: str, target: Any, *, equals: Any = _ABSENT, strict: bool = False) -> Verdict:
    """Validates against the schema ``target``, then compares with ``equals`` if it is given.

    ``strict``: the whole answer must be JSON. Otherwise, JSON may be in one fence or surrounded by prose.
    """
    try:
        value, source = _parsed(text[: MAX_CHARS * 10].strip(), strict)
    except (ValueError, RecursionError) as error:
        return Verdict(False, None, f"not JSON: {error}"[:500])
    read = source[:2000]
    try:
        problem = _problem(value, target)
    except TimeoutError:
        problem = "a pattern of the schema took too long"
    except RecursionError:
        problem = "too deep"
    if problem:
        return Verdict(False, read, f"invalid: {problem}"[:500])
    if equals is not _ABSENT and not same(value, equals):
        return Verdict(False, read, "valid, but differs from the expected value", {"expected": equals})
    return Verdict(True, read, "valid" if equals is _ABSENT else "valid and equal")


def _parsed(text: str, strict: bool) -> tuple[Any, str]:
    """Returns the value and its source. Raises ``ValueError``."""
    try:
        return strictly(text), text
    except ValueError:
        if strict:
            raise
        return _only([content for _, content in fences(text)] or _enclosed(text))


def _only(sources: list[str]) -> tuple[Any, str]:
    """Returns the only one that is JSON. Raises ``ValueError``."""
    found = []
    for source in sources:
        try:
            found.append((strictly(source), source.strip()))
        except ValueError as error:
            if len(sources) == 1:
                raise ValueError(str(error)) from None
    if len(found) != 1:
        raise ValueError("more than one value" if found else "no value")
    return found[0]


def _enclosed(text: str) -> list[str]:
    """Returns what is in the outer braces of prose, or in its outer brackets if these enclose the braces."""
    spans = [
        (start, end)
        for opening, closing in ("{}", "[]")
        if 0 <= (start := text.find(opening)) < (end := text.rfind(closing) + 1)
    ]
    outer = [one for one in spans if not any(a <= one[0] and one[1] <= b and (a, b) != one for a, b in spans)]
    return [text[start:end] for start, end in outer[:1]]


def strictly(text: str) -> Any:
    """Parses JSON. Raises ``ValueError`` for repeated names, NaN and infinities too."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _problem(value: Any, schema: Any) -> str | None:
    """Returns the first problem, None if the value is valid."""
    import jsonschema
    import referencing

    def pattern(_: Any, wanted: str, instance: Any, __: Any) -> Any:
        if isinstance(instance, str) and not compiled(wanted).search(instance, timeout=SECONDS):
            yield jsonschema.ValidationError(f"{instance[:80]!r} does not match {wanted!r}")

    kind = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": pattern})
    validator = kind(schema, registry=referencing.Registry())
    for error in validator.iter_errors(value):
        return f"{error.json_path}: {error.message}"
    return None


def same(one: Any, other: Any) -> bool:
    """Compares JSON values. 1 equals 1.0, but not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
