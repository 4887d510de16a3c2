"""Readers of fields common to several kinds of items. Each raises ``RequestError`` with the field's path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chorale.errors import RequestError, invalid, unsupported, unsupported_content
from chorale.requests.files import inline_file
from chorale.requests.prompt import tool_name
from chorale.requests.readers import Object, Reader, read_text

TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_REASONING_PARTS = frozenset({"reasoning_text", "summary_text", "text"})


def read_status(item: Object, key: str, path: str) -> str:
    return "incomplete" if item.get(key) == "incomplete" else "completed"


def read_tool_name(item: Object, key: str, path: str) -> str:
    return tool_name(item.get(key), f"{path}.{key}")


def read_execution(item: Object, key: str, path: str) -> str:
    if item.get(key, "client") != "client":
        raise unsupported(
            f"{path}.{key}", "only 'client' is supported; this server loads deferred tools immediately"
        )
    return "client"


def read_type(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise invalid(path, "must be an object with a type")
    return kind


def read_content(item: Object, key: str, path: str) -> list[dict[str, Any]]:
    """Reads the content of a message, in the parts of its role."""
    return _parts(item.get(key), item["role"], f"{path}.{key}")


def read_output(item: Object, key: str, path: str) -> str | list[dict[str, Any]]:
    """Reads an output that consists of a string or of text parts."""
    output = item.get(key)
    return output if isinstance(output, str) else _parts(output, "tool", f"{path}.{key}")


def _parts(content: Any, role: str, path: str) -> list[dict[str, Any]]:
    """Converts a string or a list of text parts to text parts of ``role``."""
    if isinstance(content, str):
        return [_text_part(content, role)]
    if not isinstance(content, list):
        raise invalid(path, "must be a string or a list of parts")
    return [_part(part, role, f"{path}[{position}]") for position, part in enumerate(content)]


def _part(part: Any, role: str, path: str) -> dict[str, Any]:
    if isinstance(part, str):
        return _text_part(part, role)
    kind = read_type(part, path)
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "refusal", "refusal": part["refusal"]}
    if kind == "input_file":
        return _text_part(inline_file(part, path, kind), role)
    if kind not in TEXT_PARTS:
        raise _unsupported_part(kind, path)
    return _text_part(read_text(part, "text", path), role)


def _text_part(text: str, role: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def reasoning_parts(kind: str) -> Reader:
    """Returns the reader of a list of reasoning, which becomes parts of type ``kind``."""

    def read(item: Object, key: str, path: str) -> list[dict[str, Any]]:
        parts, path = item.get(key), f"{path}.{key}"
        if isinstance(parts, str):
            return [{"type": kind, "text": parts}]
        if not isinstance(parts, list | None):
            raise invalid(path, "must be a list of parts")
        texts = [_reasoning_text(part, f"{path}[{position}]") for position, part in enumerate(parts or ())]
        return [{"type": kind, "text": text} for text in texts]

    return read


def _reasoning_text(part: Any, path: str) -> str:
    kind = read_type(part, path)
    if kind not in _REASONING_PARTS:
        raise _unsupported_part(kind, path)
    return read_text(part, "text", path)


def _unsupported_part(kind: str, path: str) -> RequestError:
    return unsupported_content(
        path, f"parts of type {kind[:64]!r} are not supported: the model takes text only"
    )
