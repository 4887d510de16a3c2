"""From options and conversations to prompt token ids: the parts that Chat and Responses share.

The system message holds identity, date and effort; everything that a system or developer message says goes
into developer messages, and function tools into the first of them. Text is always encoded as ordinary text.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from chorale.config import ServerConfig
from chorale.errors import ContextLengthError, RequestError
from chorale.harmony.messages import (
    DEFAULT_IDENTITY,
    DeveloperContent,
    Message,
    ReasoningEffort,
    ResponseFormat,
    SystemContent,
    ToolDescription,
    ToolNamespace,
)
from chorale.tools.contract import ToolBox

FUNCTIONS = "functions"
# Names stand in message headers, where a space or "to=" would be read as structure.
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
AUTHOR_NAME = re.compile(r"[\w.@+-]{1,64}")  # of people: letters of any script


@contextmanager
def at(param: str) -> Iterator[None]:
    """Names the parameter whose text has more tokens than any window holds."""
    try:
        yield
    except ContextLengthError as error:
        raise ContextLengthError(error.message, param=param) from None


def current_date(config: ServerConfig) -> str:
    """The pinned date, or today's: a pinned one keeps prompts (and prefix caches) equal from day to day."""
    return config.system_start_date or datetime.date.today().isoformat()


def system_message(
    config: ServerConfig, effort: ReasoningEffort, identity: str | None = None, box: ToolBox | None = None
) -> Message:
    """The system message. ``identity`` None: the model's own; ``box``: the tools that the server runs."""
    content = SystemContent(
        model_identity=DEFAULT_IDENTITY if identity is None else identity,
        current_date=current_date(config),
        reasoning_effort=effort,
        namespaces=box.system_namespaces if box is not None else (),
    )
    return Message("system", content)


def developer_message(
    instructions: str | None,
    tools: Sequence[ToolDescription],
    answer: ResponseFormat | None = None,
    about: str | None = None,
    box: ToolBox | None = None,
) -> Message | None:
    """The first developer message, or None when there is nothing to say in it. ``about``: of the tools."""
    servers = box.developer_namespaces if box is not None else ()
    if not instructions and not tools and answer is None and not servers:
        return None
    namespaces = (ToolNamespace(FUNCTIONS, about, tuple(tools)), *servers) if tools else servers
    formats = () if answer is None else (answer,)
    return Message("developer", DeveloperContent(instructions or None, namespaces, formats))


def function_tool(function: Mapping[str, Any], param: str) -> ToolDescription:
    """One declared function, its name and schema checked. Raises ``RequestError``."""
    name = function.get("name")
    if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
        raise RequestError(
            f"{param}.name: must be 1 to 64 letters, digits, underscores, dots or dashes",
            param=f"{param}.name",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{param}.description: must be a string", param=f"{param}.description")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{param}.strict: must be true or false", param=f"{param}.strict")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"{param}.parameters: must be a JSON Schema object", param=f"{param}.parameters")
    kind = parameters.get("type") if parameters is not None else None
    if kind is not None and kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(
            f"{param}.parameters.type: must be 'object', as arguments are", param=f"{param}.parameters.type"
        )
    return ToolDescription(name, description or "", parameters)


def check_distinct(tools: Sequence[ToolDescription], param: str) -> None:
    seen: set[str] = set()
    for position, tool in enumerate(tools):
        if tool.name in seen:
            raise RequestError(f"{param}[{position}]: '{tool.name}' is declared twice", param=param)
        seen.add(tool.name)
