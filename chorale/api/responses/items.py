"""Input items: checked, and brought to the one form in which they are stored, listed and rendered.

Clients replay whatever they were given, dumped with or without its null fields, with unknown keys and
without ids; all of that is read. What the model cannot take (images, files, calls of tools that are not
here) is an error that names type and index, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from chorale.api.ids import new_id
from chorale.api.prompt import TOOL_NAME
from chorale.api.responses.stored import ITEM_ID, Item
from chorale.errors import RequestError

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_REASONING_PARTS = frozenset({"reasoning_text", "summary_text", "text"})


def parse_items(raw: list[dict[str, Any]]) -> list[Item]:
    """Raises ``RequestError`` naming the first faulty item by its index in ``input``."""
    return [_parse_item(item, f"input[{position}]") for position, item in enumerate(raw)]


def _parse_item(item: Mapping[str, Any], path: str) -> Item:
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    parser = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parser is None:
        raise RequestError(
            f"{path}.type: items of type {str(kind)[:64]!r} are not supported",
            param=f"{path}.type",
            code="unsupported_item_type",
        )
    return parser(item, path)


def _message(item: Mapping[str, Any], path: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(f"{path}.role: must be one of {', '.join(ROLES)}", param=f"{path}.role")
    assert isinstance(role, str)
    parsed: Item = {
        "id": _id(item, "msg"),
        "type": "message",
        "status": _status(item),
        "role": role,
        "content": _parts(item.get("content"), role, f"{path}.content"),
    }
    if item.get("phase") in ("commentary", "final_answer"):
        parsed["phase"] = item["phase"]
    return parsed


def _parts(content: Any, role: str, path: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_text_part(content, role)]
    if not isinstance(content, list):
        raise RequestError(f"{path}: must be a string or a list of parts", param=path)
    return [_part(part, role, f"{path}[{position}]") for position, part in enumerate(content)]


def _part(part: Any, role: str, path: str) -> dict[str, Any]:
    if isinstance(part, str):
        return _text_part(part, role)
    kind = _part_type(part, path)
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "refusal", "refusal": part["refusal"]}
    if kind not in _TEXT_PARTS:
        raise _unsupported_part(kind, path)
    return _text_part(_string(part, "text", path), role)


def _text_part(text: str, role: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _reasoning(item: Mapping[str, Any], path: str) -> Item:
    parsed: Item = {"id": _id(item, "rs"), "type": "reasoning"}
    for key, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        texts = _reasoning_texts(item.get(key), f"{path}.{key}")
        parsed[key] = [{"type": kind, "text": text} for text in texts]
    encrypted = item.get("encrypted_content")
    parsed["encrypted_content"] = encrypted if isinstance(encrypted, str) else None
    parsed["status"] = _status(item)
    return parsed


def _reasoning_texts(parts: Any, path: str) -> list[str]:
    if parts is None:
        return []
    if isinstance(parts, str):
        return [parts]
    if not isinstance(parts, list):
        raise RequestError(f"{path}: must be a list of parts", param=path)
    texts: list[str] = []
    for position, part in enumerate(parts):
        kind = _part_type(part, f"{path}[{position}]")
        if kind not in _REASONING_PARTS:
            raise _unsupported_part(kind, f"{path}[{position}]")
        texts.append(_string(part, "text", f"{path}[{position}]"))
    return texts


def _function_call(item: Mapping[str, Any], path: str) -> Item:
    name = _string(item, "name", path)
    if TOOL_NAME.fullmatch(name) is None:
        raise RequestError(
            f"{path}.name: must be 1 to 64 letters, digits, underscores, dots or dashes", param=f"{path}.name"
        )
    arguments = item.get("arguments")
    if isinstance(arguments, Mapping):  # some clients parse it and forget to write it out again
        arguments = msgspec.json.encode(arguments).decode()
    if not isinstance(arguments, str | None):
        raise RequestError(f"{path}.arguments: must be a string", param=f"{path}.arguments")
    return {
        "id": _id(item, "fc"),
        "type": "function_call",
        "call_id": _string(item, "call_id", path),
        "name": name,
        "arguments": arguments or "{}",
        "status": _status(item),
    }


def _function_call_output(item: Mapping[str, Any], path: str) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = _parts(output, "tool", f"{path}.output")
    return {
        "id": _id(item, "fco"),
        "type": "function_call_output",
        "call_id": _string(item, "call_id", path),
        "output": output,
        "status": _status(item),
    }


def _item_reference(item: Mapping[str, Any], path: str) -> Item:
    return {"type": "item_reference", "id": _string(item, "id", path)}


_PARSERS: dict[str, Callable[[Mapping[str, Any], str], Item]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "item_reference": _item_reference,
}


# --------------------------------------------------------------------------- small readers


def _id(item: Mapping[str, Any], prefix: str) -> str:
    """The item's own id where it can be one of ours; everything that is listed has an id."""
    item_id = item.get("id")
    return item_id if isinstance(item_id, str) and ITEM_ID.fullmatch(item_id) else new_id(prefix)


def _status(item: Mapping[str, Any]) -> str:
    return "incomplete" if item.get("status") == "incomplete" else "completed"


def _string(item: Mapping[str, Any], key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or (not value and key != "text"):
        raise RequestError(f"{path}.{key}: must be a string", param=f"{path}.{key}")
    return value


def _part_type(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise RequestError(f"{path}: must be an object with a type", param=path)
    return kind


def _unsupported_part(kind: str, path: str) -> RequestError:
    return RequestError(
        f"{path}: parts of type {kind[:64]!r} are not supported: the model takes text only",
        param=f"{path}.type",
        code="unsupported_content_type",
    )


# --------------------------------------------------------------------------- reading parsed items


def item_text(item: Item) -> str:
    """All the text of an item; of a call its arguments."""
    if item["type"] == "function_call":
        return str(item["arguments"])
    if item["type"] == "reasoning":
        parts = item.get("content") or item.get("summary") or []
    else:
        parts = item["output"] if item["type"] == "function_call_output" else item["content"]
    if isinstance(parts, str):
        return parts
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)


def same_output(stored: Item, given: Item) -> bool:
    """Whether a client sent back what the model produced, so that its exact tokens may stand for it.

    Reasoning may come back empty: clients that keep only ``encrypted_content`` strip it.
    """
    if stored["type"] != given["type"]:
        return False
    if given["type"] == "function_call":
        return all(stored[key] == given[key] for key in ("call_id", "name", "arguments"))
    if given["type"] == "reasoning":
        return item_text(given) in ("", item_text(stored))
    return (
        given["type"] == "message"
        and stored["role"] == given["role"] == "assistant"
        and item_text(stored) == item_text(given)
    )
