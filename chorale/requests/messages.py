"""Chat messages (as JSON objects) to harmony messages. Nothing is dropped in silence.

* system and developer messages at the start are joined, in order, into the first developer message's
  instructions; later ones become developer messages at their position.
* an assistant message becomes, in this order: its reasoning (analysis), its content (final, or commentary
  when calls follow: a preamble), its calls. Which reasoning is rendered is the renderer's rule.
* a tool result is found by its ``tool_call_id``; a legacy ``function`` message by its name.
* keys that clients copy from answers into history (annotations, refusal, audio ids, ...) are accepted.

Errors name the message, and the part within it, by index.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from chorale.errors import invalid, unsupported_content
from chorale.harmony.messages import (
    FUNCTIONS,
    DeveloperContent,
    Message,
    ReasoningEffort,
    function_call,
    tool_result,
)
from chorale.requests.effort import take_effort
from chorale.requests.files import inline_file
from chorale.requests.prompt import AUTHOR_NAME, tool_name
from chorale.requests.readers import optional_string, read_arguments, read_mapping, read_string, read_text

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def take_efforts(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[Sequence[Mapping[str, Any]], ReasoningEffort | None]:
    """Returns the messages without effort lines in system and developer messages, and the last effort."""
    effort: ReasoningEffort | None = None
    kept: list[Mapping[str, Any]] = list(messages)
    for position, message in enumerate(messages):
        if message.get("role") not in ("system", "developer"):
            continue
        text, said = take_effort(content_text(message, f"messages[{position}]") or "")
        if said is not None:
            kept[position], effort = {**message, "content": text}, said
    return kept, effort


def split_instructions(messages: Sequence[Mapping[str, Any]]) -> tuple[str | None, int]:
    """Returns the leading system and developer messages, joined, and their number."""
    texts: list[str] = []
    count = 0
    for position, message in enumerate(messages):
        if message.get("role") not in ("system", "developer"):
            break
        count += 1
        text = content_text(message, f"messages[{position}]")
        if text:
            texts.append(text)
    return ("\n\n".join(texts) or None), count


def to_harmony(
    messages: Sequence[Mapping[str, Any]], first: int = 0, freeform: Collection[str] = ()
) -> list[Message]:
    """Converts ``messages[first:]``. Raises ``RequestError`` naming message and part.

    ``freeform``: custom tools whose calls are their plain input.
    """
    converted: list[Message] = []
    calls: dict[str, str] = {}  # tool_call_id -> function name
    for position, message in enumerate(messages[first:], first):
        path, role = f"messages[{position}]", message.get("role")
        if role in ("system", "developer"):
            if text := content_text(message, path):
                converted.append(Message("developer", DeveloperContent(text)))
        elif role == "user":
            converted.append(Message("user", content_text(message, path) or "", _author(message, path)))
        elif role == "assistant":
            converted += _assistant(message, path, calls, freeform)
        elif role == "tool":
            converted.append(_tool_result(message, path, calls))
        elif role == "function":
            converted.append(_result(tool_name(message.get("name"), f"{path}.name"), message, path))
        else:
            raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    return converted


# --------------------------------------------------------------------------- one message


def _assistant(
    message: Mapping[str, Any], path: str, calls: dict[str, str], freeform: Collection[str]
) -> list[Message]:
    converted: list[Message] = []
    reasoning = reasoning_text(message, path)
    if reasoning:
        converted.append(Message("assistant", reasoning, channel="analysis"))
    made = _calls(message, path, calls, freeform)
    content = content_text(message, path) or optional_string(message, "refusal", path)
    if content:
        converted.append(Message("assistant", content, channel="commentary" if made else "final"))
    elif content == "" and not made and not reasoning:
        converted.append(Message("assistant", "", channel="final"))
    return converted + made


def reasoning_text(message: Mapping[str, Any], path: str) -> str | None:
    """Returns ``reasoning`` or ``reasoning_content``; clients send either or both."""
    return optional_string(message, "reasoning", path) or optional_string(message, "reasoning_content", path)


def _calls(
    message: Mapping[str, Any], path: str, calls: dict[str, str], freeform: Collection[str]
) -> list[Message]:
    made: list[Message] = []
    tool_calls = message.get("tool_calls") or []
    if not isinstance(tool_calls, list):
        raise invalid(f"{path}.tool_calls", "must be a list")
    for position, call in enumerate(tool_calls):
        call_path = f"{path}.tool_calls[{position}]"
        kind = (call.get("type") or "function") if isinstance(call, Mapping) else None
        if kind not in ("function", "custom"):
            raise invalid(f"{call_path}.type", "must be 'function' or 'custom'")
        call_id = read_string(call, "id", call_path)
        calls[call_id], call_message = _call(call, kind, call_path, freeform)
        made.append(call_message)
    if message.get("function_call") is not None:  # the form before tool calls
        made.append(_call(message, "function_call", path)[1])
    return made


def _call(
    given: Mapping[str, Any], key: str, path: str, freeform: Collection[str] = ()
) -> tuple[str, Message]:
    """Returns the name and the call that an object has under ``key``."""
    call, path = read_mapping(given, key, path), f"{path}.{key}"
    name = tool_name(call.get("name"), f"{path}.name")
    if key != "custom":
        return name, function_call(name, read_arguments(call, "arguments", path))
    text = read_text(call, "input", path)
    is_text = name in freeform
    arguments = text if is_text else msgspec.json.encode({"input": text}).decode()
    return name, function_call(name, arguments, is_json=not is_text)


def _tool_result(message: Mapping[str, Any], path: str, calls: Mapping[str, str]) -> Message:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or call_id not in calls:
        shown = repr(call_id)[:80]
        raise invalid(
            f"{path}.tool_call_id", f"{shown} is not the id of a tool call in an earlier assistant message"
        )
    return _result(calls[call_id], message, path)


def _result(name: str, message: Mapping[str, Any], path: str) -> Message:
    return tool_result(f"{FUNCTIONS}.{name}", content_text(message, path) or "")


# --------------------------------------------------------------------------- text


def content_text(message: Mapping[str, Any], path: str) -> str | None:
    """Returns a string, or text parts joined as in harmony (without a separator)."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        if content is None and message.get("role") not in ("assistant", "tool", "function"):
            raise invalid(f"{path}.content", "must be a string or a list of parts")
        return content
    if not isinstance(content, list):
        raise invalid(f"{path}.content", "must be a string or a list of parts")
    return "".join(_part_text(part, f"{path}.content[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise invalid(path, "must be an object with a type")
    if kind in _TEXT_PARTS or kind == "refusal":
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise invalid(path, f"a '{kind}' part needs a string")
        return text
    if kind == "file" and isinstance(part.get("file"), Mapping):
        return inline_file(part["file"], path, kind)
    raise unsupported_content(
        path, f"parts of type '{kind[:64]}' are not supported: the model takes text only"
    )


def _author(message: Mapping[str, Any], path: str) -> str | None:
    name = message.get("name")
    if name is None:
        return None
    if not isinstance(name, str) or AUTHOR_NAME.fullmatch(name) is None:
        raise invalid(f"{path}.name", "must be 1 to 64 letters, digits or any of _ . @ + -")
    return name
