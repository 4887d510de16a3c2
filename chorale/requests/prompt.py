"""The parts of a prompt that all endpoints share: head, declared functions, a message to continue.

The system message holds identity, date and effort; the text of system and developer messages becomes
developer messages, and function tools go into the first of these. Text is always encoded as ordinary text.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from chorale.config.engine import ServerConfig
from chorale.errors import ContextLengthError, RequestError, invalid
from chorale.harmony.messages import (
    DEFAULT_IDENTITY,
    FUNCTIONS,
    DeveloperContent,
    Message,
    ReasoningEffort,
    ResponseFormat,
    SystemContent,
    ToolDescription,
    ToolNamespace,
)
from chorale.harmony.vocab import CHANNEL, MESSAGE, Vocabulary
from chorale.requests.readers import optional_flag, optional_string
from chorale.tools.contract import ToolBox
from chorale.turns.functions import Function

# Names are part of message headers, where a space or "to=" would be read as structure.
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
AUTHOR_NAME = re.compile(r"[\w.@+-]{1,64}")  # author names: letters of any script


@contextmanager
def at(param: str) -> Iterator[None]:
    """Adds the parameter to the error of a text with more tokens than any context window."""
    try:
        yield
    except ContextLengthError as error:
        raise ContextLengthError(error.message, param=param) from None


def system_message(
    config: ServerConfig, effort: ReasoningEffort, identity: str | None = None, box: ToolBox | None = None
) -> Message:
    """``identity``: None for the model's own; ``box``: the built-in tools."""
    content = SystemContent(
        model_identity=DEFAULT_IDENTITY if identity is None else identity,
        # A pinned date keeps prompts (and prefix caches) equal.
        current_date=config.system_start_date or datetime.date.today().isoformat(),
        reasoning_effort=effort,
        namespaces=box.system_namespaces if box is not None else (),
    )
    return Message("system", content)


def prompt_head(
    config: ServerConfig,
    effort: ReasoningEffort,
    instructions: str | None,
    tools: Sequence[ToolDescription],
    answer: ResponseFormat | None = None,
    *,
    identity: str | None = None,
    about: str | None = None,
    box: ToolBox | None = None,
) -> list[Message]:
    """Returns the system message, and the first developer message unless it is empty.

    ``about``: a note on the functions.
    """
    if config.system_instructions and instructions:
        identity = "\n".join(filter(None, (DEFAULT_IDENTITY if identity is None else identity, instructions)))
        instructions = None
    system = system_message(config, effort, identity, box)
    servers = box.developer_namespaces if box is not None else ()
    if not instructions and not tools and answer is None and not servers:
        return [system]
    namespaces = (ToolNamespace(FUNCTIONS, about, tuple(tools)), *servers) if tools else servers
    content = DeveloperContent(instructions or None, namespaces, () if answer is None else (answer,))
    return [system, Message("developer", content)]


def open_message(channel: str, text: str, vocab: Vocabulary, most: int) -> tuple[tuple[int, ...], list[int]]:
    """Returns an assistant message that the model continues: its header, and all of its ids so far.

    Raises ``ContextLengthError`` for more than ``most`` ids.
    """
    header = (CHANNEL, *vocab.encode(channel), MESSAGE)
    with at("messages"):
        return header, [*header, *vocab.encode(text, most)]


def tool_name(value: object, path: str) -> str:
    """Returns a name that is valid in a header. Raises ``RequestError``."""
    if not isinstance(value, str) or TOOL_NAME.fullmatch(value) is None:
        raise invalid(path, "must be 1 to 64 letters, digits, underscores, dots or dashes")
    return value


def function_tool(function: Mapping[str, Any], param: str) -> ToolDescription:
    """Returns a declared function with checked name and schema. Raises ``RequestError``."""
    name = tool_name(function.get("name"), f"{param}.name")
    description = optional_string(function, "description", param)
    optional_flag(function, "strict", param)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise invalid(f"{param}.parameters", "must be a JSON Schema object")
    kind = parameters.get("type") if parameters is not None else None
    if kind is not None and kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise invalid(f"{param}.parameters.type", "must be 'object', as arguments are")
    return ToolDescription(name, description or "", parameters)


def read_function(value: Mapping[str, Any], param: str) -> Function:
    """Raises ``RequestError``."""
    return Function(function_tool(value, param), value.get("strict") is True, f"{param}.parameters")


def check_distinct(tools: Sequence[ToolDescription], param: str) -> None:
    """Raises ``RequestError`` for a name that is declared twice."""
    seen: set[str] = set()
    for position, tool in enumerate(tools):
        if tool.name in seen:
            raise RequestError(f"{param}[{position}]: '{tool.name}' is declared twice", param=param)
        seen.add(tool.name)
