"""Compares function calls with the accepted ones: names, arguments, types, values.

The verdicts are those of the leaderboard's checker (``scripts/bfcl_verdicts.py`` compares them).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from chorale.evaluation.tasks.bfcl import java, javascript
from chorale.evaluation.tasks.bfcl.calls import Call
from chorale.evaluation.tasks.bfcl.fault import Fault
from chorale.evaluation.tasks.bfcl.schema import legal_name
from chorale.evaluation.tasks.bfcl.values import Kind, check_value

_PYTHON_TYPES: dict[str, type] = {
    "string": str, "integer": int, "float": float, "boolean": bool, "array": list, "tuple": list,
    "dict": dict, "any": str,
}  # fmt: skip
_LITERALS: dict[str, tuple[ModuleType, str]] = {
    "java": (java, "type_error:java"),
    "javascript": (javascript, "type_error:js"),
}


def check_calls(
    functions: Sequence[dict[str, Any]],
    calls: Sequence[Call],
    answers: Sequence[dict[str, Any]],
    language: str,
    category: str,
) -> Fault | None:
    """Returns the reason why the calls are wrong, None if they are right.

    ``answers``: for each expected call its name and, for each argument, the list of accepted values.
    """
    if "parallel" in category:
        return _check_parallel(functions, calls, answers, language)
    multiple = "multiple" in category
    if len(calls) != (len(answers) if multiple else 1):
        checker = "multiple" if multiple else "simple"
        return Fault(f"{checker}_function_checker:wrong_count", f"Wrong number of calls: {len(calls)}.")
    function = _described(functions, answers[0]) if multiple else functions[0]
    return _check_call(function, calls[0], answers[0], language)


def _described(functions: Sequence[dict[str, Any]], answer: dict[str, Any]) -> dict[str, Any]:
    name = next(iter(answer))
    return next(function for function in functions if function["name"] == name)


def _check_parallel(
    functions: Sequence[dict[str, Any]],
    calls: Sequence[Call],
    answers: Sequence[dict[str, Any]],
    language: str,
) -> Fault | None:
    """Matches calls with answers in any order: each answer takes the first call that satisfies it."""
    kind = "parallel_function_checker_no_order"
    if len(calls) != len(answers):
        return Fault(f"{kind}:wrong_count", f"Wrong number of calls: {len(calls)}, expected {len(answers)}.")
    left = list(calls)
    for answer in answers:
        faults = []
        for place, call in enumerate(left):
            fault = _check_call(_described(functions, answer), call, answer, language)
            if fault is None:
                del left[place]
                break
            faults.append(f"{call}: {fault.message}")
        else:
            return Fault(f"{kind}:cannot_find_match", f"No call matches {answer}.", {"calls": faults})
    return None


def _check_call(function: dict[str, Any], call: Call, answer: dict[str, Any], language: str) -> Fault | None:
    kind = "simple_function_checker"
    accepted = next(iter(answer.values()))
    described, required = function["parameters"]["properties"], function["parameters"]["required"]
    name = legal_name(function["name"])
    if name not in call:
        return Fault(f"{kind}:wrong_func_name", f"Function {name!r} is not called.")
    arguments = call[name]
    for parameter in required:
        if parameter not in arguments:
            return Fault(f"{kind}:missing_required", f"Missing required parameter {parameter!r}.")
    for parameter, value in arguments.items():
        if parameter not in described or parameter not in accepted:
            return Fault(f"{kind}:unexpected_param", f"Unexpected parameter {parameter!r}.")
        fault = _check_argument(parameter, value, described[parameter], accepted[parameter], language)
        if fault is not None:
            return fault
    for parameter, values in accepted.items():
        if parameter not in arguments and "" not in values:
            return Fault(
                f"{kind}:missing_optional", f"Missing parameter {parameter!r}, which is not optional."
            )
    return None


def _check_argument(
    name: str, value: Any, schema: dict[str, Any], accepted: Sequence[Any], language: str
) -> Fault | None:
    declared = schema["type"]
    if language == "python":
        inner = _PYTHON_TYPES[schema["items"]["type"]] if declared in ("array", "tuple") else None
        kind = Kind(declared, _PYTHON_TYPES[declared], inner)
        if declared == "float" and type(value) is int:
            value = float(value)
        return check_value(name, value, accepted, kind)
    literals, error = _LITERALS[language]
    if type(value) is not str:
        return Fault(error, f"Wrong type of parameter {name!r}: expected a string, got {value!r}.")
    element = schema["items"]["type"] if declared in literals.NESTED else None
    kind = Kind(declared, literals.TYPES[declared], literals.TYPES[element] if element else None)
    return check_value(name, literals.read(value, declared, element), accepted, kind)
