"""The graders of ``file:`` tasks by name, with their options and the check of a line's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chorale_evals.graders import choice, exact, number, regex, schema, unit_test


@dataclass(frozen=True, slots=True)
class Grader:
    """``grade(text, answer, **options)`` returns an ``Outcome``, or an awaitable of one.

    ``check(answer, options)`` raises ``ValueError`` for an answer that cannot be graded with.
    ``options``: the accepted names with their types.
    """

    grade: Callable[..., Any]
    check: Callable[[Any, Mapping[str, Any]], None]
    options: Mapping[str, tuple[type, ...]] = field(default_factory=dict)


def _string(answer: Any) -> None:
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("the answer must be a string that is not empty")


def _exact(answer: Any, _: Mapping[str, Any]) -> None:
    answers = answer if isinstance(answer, list) else [answer]
    if not answers:
        raise ValueError("the list of answers is empty")
    for one in answers:
        _string(one)


def _number(answer: Any, options: Mapping[str, Any]) -> None:
    if not isinstance(answer, (int, float, str)):
        raise ValueError("the answer must be a number")
    number.value_of(answer)
    for name in ("tolerance", "relative"):
        if options.get(name, 0) < 0:
            raise ValueError(f"{name} must not be negative")


def _choice(answer: Any, options: Mapping[str, Any]) -> None:
    _string(answer)
    choices = options.get("choices", ())
    if not all(isinstance(one, str) for one in choices):
        raise ValueError("choices must be strings")
    letters = choice.LETTERS[: len(choices)] if choices else choice.LETTERS
    letter = choice.letter_of(answer)
    if len(letter) != 1 or letter not in letters or len(choices) > len(choice.LETTERS):
        raise ValueError(f"the answer must be one of the letters {letters[0]} to {letters[-1]}")


def _regex(answer: Any, options: Mapping[str, Any]) -> None:
    _string(answer)
    regex.compiled(answer, options.get("ignore_case", False))


def _schema(answer: Any, _: Mapping[str, Any]) -> None:
    if not isinstance(answer, (dict, bool)):
        raise ValueError("the answer must be a JSON schema")
    schema.check_schema(answer)


def _unit_test(answer: Any, options: Mapping[str, Any]) -> None:
    _string(answer)
    if not 0 < options.get("seconds", 10.0) <= 600:
        raise ValueError("seconds must be in (0, 600]")


_ANY: tuple[type, ...] = (object,)
_REAL: tuple[type, ...] = (int, float)
GRADERS: dict[str, Grader] = {
    "exact": Grader(exact.grade, _exact, {"ignore_case": (bool,)}),
    "number": Grader(number.grade, _number, {"tolerance": _REAL, "relative": _REAL}),
    "choice": Grader(choice.grade, _choice, {"choices": (list,)}),
    "regex": Grader(regex.grade, _regex, {"whole": (bool,), "ignore_case": (bool,)}),
    "json_schema": Grader(schema.grade, _schema, {"equals": _ANY, "strict": (bool,)}),
    "unit_test": Grader(unit_test.grade, _unit_test, {"seconds": _REAL}),
}
