"""Reads the function calls in a reply of the model."""

from __future__ import annotations

import json
from typing import Any

from chorale.evaluation.task import Reply

Call = dict[str, Any]  # {name: arguments}, as the leaderboard's answers have it


def read_calls(reply: Reply) -> list[Call] | None:
    """Returns the calls of a reply, None if it has none or the arguments of one are not a JSON object."""
    calls: list[Call] = []
    for call in reply.tool_calls:
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            return None
        if not isinstance(arguments, dict):
            return None
        calls.append({call.name: arguments})
    return calls or None


def as_python(call: Call) -> str:
    """Returns a call as Python source, which is the form of the leaderboard's multi-turn answers."""
    ((name, arguments),) = call.items()
    return f"{name}({','.join(f'{key}={value!r}' for key, value in arguments.items())})"
