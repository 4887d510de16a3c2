"""Readers of fields common to several kinds of items. Each raises ``RequestError`` with the field's path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chorale.errors import RequestError, invalid, unsupported_content
from chorale.ids import new_id
from chorale.requests.files import inline_file
from chorale.requests.readers import read_string
from chorale.store.protocol import ITEM_ID, Item
from chorale.turns.events import ID_PREFIX

_ID_PREFIX: dict[str, str] = {
    **ID_PREFIX, "function_call_output": "fco", "custom_tool_call_output": "cto",
    "local_shell_call_output": "lso", "shell_call_output": "sho", "apply_patch_call_output": "apo",
    "tool_search_output": "tso", "additional_tools": "at", "mcp_approval_response": "mcpa",
    "compaction_trigger": "cmt",
}  # fmt: skip
TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


def read_head(item: Mapping[str, Any], kind: str, *, status: bool = True) -> Item:
    """Returns id, type and status. Every listed item needs an id: one without a valid id gets a new one."""
    item_id = item.get("id")
    if not isinstance(item_id, str) or ITEM_ID.fullmatch(item_id) is None:
        item_id = new_id(_ID_PREFIX[kind])
    head: Item = {"id": item_id, "type": kind}
    return {**head, "status": read_status(item)} if status else head


def read_status(item: Mapping[str, Any]) -> str:
    return "incomplete" if item.get("status") == "incomplete" else "completed"


def read_type(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise invalid(path, "must be an object with a type")
    return kind


def read_parts(content: Any, role: str, path: str) -> list[dict[str, Any]]:
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
        raise unsupported_part(kind, path)
    return _text_part(read_string(part, "text", path, empty=True), role)


def _text_part(text: str, role: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def unsupported_part(kind: str, path: str) -> RequestError:
    return unsupported_content(
        path, f"parts of type {kind[:64]!r} are not supported: the model takes text only"
    )
