"""``json_schema``: the answer is JSON that is valid against a schema, and optionally equal to a value."""

from __future__ import annotations

import contextlib
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import msgspec
import referencing

from chorale_evals.graders import Grader, regex, verdict
from chorale_evals.graders.text import MAX_CHARS, fences
from chorale_evals.task import Outcome
from chorale_evals.wire import strictly


class JsonSchema(Grader, frozen=True, tag="json_schema"):
    """Validates the answer against the target, a JSON schema, then compares it with ``equals`` if given.

    ``strict``: the whole answer must be JSON. Otherwise, JSON may be in one fenced block or inside prose.
    """

    equals: Any = msgspec.UNSET
    strict: bool = False

    def check(self, answer: Any) -> None:
        """Raises ``ValueError`` for an invalid schema, or one that refers to another document."""
        if not isinstance(answer, (dict, bool)):
            raise ValueError("the answer must be a JSON schema")
        try:
            jsonschema.Draft202012Validator.check_schema(answer)
        except jsonschema.SchemaError as error:
            raise ValueError(f"not a JSON schema: {error.message}") from None
        if _refers_outside(answer):
            raise ValueError("a $ref points outside the schema")

    def grade(self, text: str, target: Any) -> Outcome:
        source = text[: MAX_CHARS * 10].strip()
        try:
            value = strictly(source) if self.strict else _value(source)
            problem = _problem(value, target)
        except ValueError as error:
            return verdict(False, None, f"not JSON: {error}"[:500])
        except RecursionError:
            return verdict(False, None, "JSON is nested too deeply")
        except TimeoutError:
            problem = "a pattern of the schema took too long"
        if problem:
            return verdict(False, source[:2000], f"invalid: {problem}"[:500])
        if self.equals is msgspec.UNSET:
            return verdict(True, source[:2000], "valid")
        if not same(value, self.equals):
            return verdict(False, source[:2000], "valid, but differs from the expected value")
        return verdict(True, source[:2000], "valid and equal")


def _refers_outside(value: Any) -> bool:
    if isinstance(value, dict):
        reference = value.get("$ref", "#")
        outside = isinstance(reference, str) and not reference.startswith("#")
        return outside or any(map(_refers_outside, value.values()))
    return isinstance(value, list) and any(map(_refers_outside, value))


def _value(text: str) -> Any:
    """Parses the whole text, else its only fenced block, else its outermost braces or brackets."""
    try:
        return strictly(text)
    except ValueError:
        blocks = fences(text)
    found = []
    for block in blocks:
        with contextlib.suppress(ValueError):
            found.append(strictly(block))
    if len(found) == 1:
        return found[0]
    starts = [index for index in map(text.find, "{[") if index >= 0]
    if blocks or not starts:
        raise ValueError("more than one value" if found else "no value")
    start = min(starts)
    return strictly(text[start : text.rfind("}" if text[start] == "{" else "]") + 1])


def _problem(value: Any, schema: Any) -> str | None:
    """Returns the first problem, None if the value is valid."""

    def pattern(_: Any, wanted: str, instance: Any, __: Any) -> Any:
        if isinstance(instance, str) and not regex.compiled(wanted).search(instance, timeout=regex.SECONDS):
            yield jsonschema.ValidationError(f"{instance[:80]!r} does not match {wanted!r}")

    kind = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": pattern})
    for error in kind(schema, registry=referencing.Registry()).iter_errors(value):
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
