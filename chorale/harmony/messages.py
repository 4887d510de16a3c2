"""Harmony conversations and parser events as frozen values.

Source: OpenAI's harmony format guide. Field names follow ``openai_harmony``, so that the two can be compared.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]
Channel = Literal["analysis", "commentary", "final"]
ReasoningEffort = Literal["low", "medium", "high"]

FUNCTIONS = "functions"  # the namespace of the client's tools
JSON_TYPE = "<|constrain|>json"
DEFAULT_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
KNOWLEDGE_CUTOFF = "2024-06"


@dataclass(frozen=True, slots=True)
class ToolDescription:
    """One callable tool. ``parameters`` is a JSON Schema, or None for a call without arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolNamespace:
    """A group of tools under one name ("functions", "browser", "python", an MCP label)."""

    name: str
    description: str | None = None
    tools: tuple[ToolDescription, ...] = ()


@dataclass(frozen=True, slots=True)
class SystemContent:
    """The system message. ``namespaces`` are the built-in tools; client tools are in the developer
    message.
    """

    model_identity: str = DEFAULT_IDENTITY
    current_date: str | None = None  # YYYY-MM-DD; None leaves the line out
    reasoning_effort: ReasoningEffort = "medium"
    namespaces: tuple[ToolNamespace, ...] = ()


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """An entry of "# Response Formats": it describes a format to the model, and a grammar enforces it."""

    name: str
    schema: Mapping[str, Any]
    description: str | None = None


@dataclass(frozen=True, slots=True)
class DeveloperContent:
    instructions: str | None = None
    namespaces: tuple[ToolNamespace, ...] = ()
    response_formats: tuple[ResponseFormat, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One harmony message.

    ``name`` is the author's name: for role "tool" the full tool name ("functions.get_weather").
    ``token_ids`` are the exact ids the model produced for it, from after ``<|start|>assistant`` up to and
    excluding the terminator; when present they are replayed instead of re-rendering the fields.
    """

    role: Role
    content: str | SystemContent | DeveloperContent
    name: str | None = None
    recipient: str | None = None  # None means "all"
    channel: str | None = None
    content_type: str | None = None  # for example JSON_TYPE or "code"
    token_ids: tuple[int, ...] | None = None


def function_call(name: str, arguments: str, *, is_json: bool = True) -> Message:
    """Returns a call to a client tool. ``is_json``: the header declares the arguments as JSON."""
    content_type = JSON_TYPE if is_json else None
    return tool_call(f"{FUNCTIONS}.{name}", arguments, content_type)


def tool_call(recipient: str, arguments: str, content_type: str | None = JSON_TYPE) -> Message:
    """Returns a call to a tool by its full name."""
    return Message(
        "assistant", arguments, recipient=recipient, channel="commentary", content_type=content_type
    )


def tool_result(author: str, content: str, channel: str = "commentary") -> Message:
    """Returns the result of a tool. ``author``: the tool's full name ("functions.get_weather")."""
    return Message("tool", content, name=author, recipient="assistant", channel=channel)


# --------------------------------------------------------------------------- parser events


class Terminator(enum.Enum):
    END = "<|end|>"
    RETURN = "<|return|>"
    CALL = "<|call|>"
    IMPLICIT = "implicit"  # a new message began without one
    CUT = "cut"  # generation ended inside the message (max tokens, abort)


@dataclass(frozen=True, slots=True)
class MessageStart:
    """A header was complete (``<|message|>`` was seen, or content began without a header)."""

    channel: Channel
    recipient: str | None  # "functions.get_weather", "browser.search", "python", ...; None: the user
    content_type: str | None  # "json", "code", ...; never carries "<|constrain|>"


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text of the current message, never empty, and the number of tokens that it completes.

    Over a message, the numbers add up to its content tokens without reserved ones, which are skipped.
    """

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """``token_ids``: the message's exact ids, header included, terminator excluded (for replay)."""

    terminator: Terminator
    token_ids: tuple[int, ...]


RepairKind = Literal[
    "implicit_start", "missing_header", "duplicate_recipient", "junk_in_header", "unknown_channel",
    "channel_in_content", "glued_token", "reserved_token", "cut_header", "tokens_after_end",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Repair:
    """A malformed part of the stream, which was read in the most plausible way. Counted, never raised."""

    kind: RepairKind


HarmonyEvent = MessageStart | ContentDelta | MessageEnd | Repair
