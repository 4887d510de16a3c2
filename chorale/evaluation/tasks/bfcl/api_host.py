"""The process of one test case's API classes: makes their instances, calls them, compares their states.

The classes are third-party code, hence a process of their own. It is started by its path, with standard
library only, and imports what its first message names. A line of JSON on stdin is a request, a line on stdout
its answer. A call is Python source: of a public method, with plain values.

Each side (the model while it is asked, its calls once more, and the expected calls) has its own instances.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import os
import re
import resource
import sys
import types
from typing import Any

# Published by the leaderboard (bfcl_eval 2026.3.23, Apache-2.0): results that the model reads depend on them.
_REFUSED = ("kill", "exit", "quit", "remove", "unlink", "popen", "Popen", "run")
_NAME = re.compile(r"\b([a-zA-Z_]\w*)\s*(?=\()")
_NOT_IN_NAMES = re.compile(r"[-./:]")

_PACKAGE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
_SHOWN = 500  # characters of a value in a difference


class Host:
    def __init__(self, start: dict[str, Any]) -> None:
        self._id: str = start["id"]
        self._initial: dict[str, Any] = start["initial"]
        self._long_context: bool = start["long_context"]
        self._classes = {name: _load(module, name) for name, module in start["classes"].items()}
        self._sides: dict[str, dict[str, Any]] = {}
        self._instances("model")  # a state that cannot be loaded is no fault of a call

    def answer(self, request: dict[str, Any]) -> Any:
        if request["do"] == "call":
            return self.call(request["side"], request["calls"])
        return self.compare(request["side"], request["other"])

    def _instances(self, side: str) -> dict[str, Any]:
        if side not in self._sides:
            self._sides[side] = {name: self._made(name) for name in self._classes}
        return self._sides[side]

    def _made(self, name: str) -> Any:
        instance = self._classes[name]()
        if hasattr(instance, "_load_scenario"):  # MathAPI has no state
            initial = copy.deepcopy(self._initial.get(name, {}))
            instance._load_scenario(initial, long_context=self._long_context)
        return instance

    # ------------------------------------------------------------------ calls

    def call(self, side: str, calls: list[str]) -> list[str]:
        """Evaluates the calls in order. Returns their results as the leaderboard words them."""
        variables, owners = {}, {}
        for name, instance in self._instances(side).items():
            variable = _NOT_IN_NAMES.sub("_", f"{side}_{self._id}_{name}_instance")
            variables[variable] = instance
            for method, _ in inspect.getmembers(instance, predicate=inspect.ismethod):
                if not method.startswith("_"):
                    owners[method] = variable
        return [_result(call, owners, variables) for call in calls]

    # ------------------------------------------------------------------ states

    def compare(self, side: str, other: str) -> dict[str, Any]:
        """Returns the public attributes of the first class that differ from those of ``other``."""
        for name, expected in self._instances(other).items():
            found = self._instances(side)[name]
            differences = {
                key: [_shown(getattr(found, key, None)), _shown(value)]
                for key, value in vars(expected).items()
                if not key.startswith("_") and not _equal(getattr(found, key, None), value)
            }
            if differences:
                return {"class": name, "differences": differences}
        return {}


def _equal(found: Any, expected: Any) -> bool:
    try:
        return bool(found == expected)
    except Exception:
        return False


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(error).__name__}>"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _result(call: str, owners: dict[str, str], variables: dict[str, Any]) -> str:
    def owned(match: re.Match[str]) -> str:
        name = match[1]
        return f"{owners[name]}.{name}" if name in owners else name

    source = _NAME.sub(owned, call)  # also inside of strings, as the leaderboard does
    name = source.split("(")[0]
    name = name.split(".")[1] if "." in name else name
    try:
        if name in _REFUSED:
            raise ValueError(f"Function call {name} is not allowed.")
        return _as_text(_evaluate(source, variables))
    except Exception as error:
        return f"Error during execution: {error}"


def _evaluate(source: str, variables: dict[str, Any]) -> Any:
    """Calls a public method of an instance with the plain values in the source."""
    call = ast.parse(source, "<string>", "eval").body
    function = call.func if isinstance(call, ast.Call) else None
    if not isinstance(call, ast.Call) or not isinstance(function, ast.Attribute | ast.Name):
        raise ValueError("this is not a function call")
    if isinstance(function, ast.Name):
        raise NameError(f"name {function.id!r} is not defined")
    owner = variables.get(function.value.id) if isinstance(function.value, ast.Name) else None
    if owner is None or function.attr.startswith("_"):
        raise NameError(f"name {ast.unparse(function)!r} is not defined")
    positional = [ast.literal_eval(argument) for argument in call.args]
    named = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
    return getattr(owner, function.attr)(*positional, **named)


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError, RecursionError):
            return str(result)
    return str(result)


def _load(module: str, name: str) -> type:
    loaded: type = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
    return loaded


def _prepare_package(path: str) -> None:
    """Makes the package that the classes name in their imports, without the rest of bfcl_eval."""
    whole = ""
    for part in _PACKAGE.split("."):
        whole = f"{whole}.{part}".lstrip(".")
        package = types.ModuleType(whole)
        package.__path__ = [path] if whole == _PACKAGE else []
        sys.modules[whole] = package


def _set_limits(start: dict[str, Any]) -> None:
    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, start["memory_bytes"]),
        (resource.RLIMIT_FSIZE, 0),
    ):
        try:
            resource.setrlimit(which, (value, value))
        except (ValueError, OSError):
            pass  # already lower


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the classes print
    start = json.loads(sys.stdin.readline())
    sys.path[:0] = start["path"]
    from chorale.processes import die_with_parent

    die_with_parent(start["parent_pid"])
    _set_limits(start)
    _prepare_package(start["import_path"])
    host: Host | None = None
    try:
        host = Host(start)
        answer: dict[str, Any] = {"ok": None}
    except Exception as error:
        answer = {"fault": f"{type(error).__name__}: {error}"}
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line or host is None:
            return
        try:
            answer = {"ok": host.answer(json.loads(line))}
        except Exception as error:
            answer = {"fault": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
