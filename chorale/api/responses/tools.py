"""The ``tools`` and ``tool_choice`` of a request: what the model is told, and what is echoed.

Functions are honoured, flat or in Chat's nested shape. Tool types that cannot run here (hosted tools,
custom, namespace, shell, ...) do not fail the request, because agents declare them as a matter of course:
they are left out of the prompt, so they are never called, and echoed in ``tools``; each type is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chorale.api.prompt import check_distinct
from chorale.api.tool_choice import Function, ToolChoice, read_tool_choice
from chorale.errors import RequestError
from chorale.harmony.messages import ToolDescription

logger = logging.getLogger("chorale.api.responses")

_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_MAX_LOGGED = 64  # the types are the clients' words; the set of those already logged must not grow


@dataclass(frozen=True, slots=True)
class ToolSet:
    functions: tuple[Function, ...]  # rendered in the prompt
    echo: list[dict[str, Any]]
    choice: ToolChoice
    echo_choice: str | dict[str, Any]

    @property
    def descriptions(self) -> list[ToolDescription]:
        return [function.tool for function in self.functions]


def read_tools(tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any]) -> ToolSet:
    """Raises ``RequestError`` naming the tool by index, or what is wrong with the choice."""
    functions: list[Function] = []
    echo: list[dict[str, Any]] = []
    for position, tool in enumerate(tools):
        path = f"tools[{position}]"
        kind = tool.get("type")
        if not isinstance(kind, str) or not kind:
            raise RequestError(f"{path}.type: must be a string", param=f"{path}.type")
        if kind == "function":
            flat = _flatten(tool, path)
            functions.append(Function.read(flat, path))
            echo.append(flat)
        else:
            _log_once(kind)
            echo.append(dict(tool))
    check_distinct([function.tool for function in functions], "tools")
    choice = read_tool_choice(tool_choice, functions, "tool_choice")
    echo_choice = tool_choice if isinstance(tool_choice, str) else dict(tool_choice)
    return ToolSet(tuple(functions), echo, choice, echo_choice)


def _flatten(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """OpenAI's flat form, every key present."""
    nested = tool.get("function")
    if nested is not None and not isinstance(nested, Mapping):
        raise RequestError(f"{path}.function: must be an object", param=f"{path}.function")
    source = {**tool, **nested} if nested is not None else tool
    return {"type": "function", **{key: source.get(key) for key in _FUNCTION_KEYS}}


_logged: set[str] = set()


def _log_once(kind: str) -> None:
    shown = kind[:64]
    if shown in _logged or len(_logged) >= _MAX_LOGGED:
        return
    _logged.add(shown)
    logger.warning("tools of type %r cannot run here: they are echoed, and left out of the prompt", shown)
