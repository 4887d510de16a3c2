"""Validation of input items and conversion to the form in which they are stored, listed and rendered.

Clients return items as they received them, without null fields or ids, or with unknown keys; all of these are
accepted. Unsupported content (images, files, calls of unavailable tools) is refused with its type and index,
never silently dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chorale.api.responses.items import built_in as built_in_items
from chorale.api.responses.items import built_in_input, client_calls
from chorale.api.responses.items import client_input as client_items
from chorale.api.responses.items.encrypted_content import Budget, unseal
from chorale.api.responses.items.fields import (
    read_head,
    read_parts,
    read_status,
    read_type,
    unsupported_part,
)
from chorale.api.responses.items.to_harmony import item_text
from chorale.errors import RequestError, invalid
from chorale.requests.readers import read_string
from chorale.store.protocol import Item

ROLES = ("user", "assistant", "system", "developer")
_REASONING_PARTS = frozenset({"reasoning_text", "summary_text", "text"})


def parse_items(raw: list[dict[str, Any]], path: str = "input") -> list[Item]:
    """Parses items. Raises ``RequestError`` with the index of the first invalid item in ``path``."""
    budget = Budget()
    items = [_parse_item(item, f"{path}[{position}]", budget) for position, item in enumerate(raw)]
    for position, item in enumerate(items[:-1]):
        if item["type"] == "compaction_trigger":
            raise invalid(f"{path}[{position}]", "a compaction_trigger must be the last item")
    return items


def _parse_item(item: Mapping[str, Any], path: str, budget: Budget) -> Item:
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if kind == "compaction":
        return _compaction(item, path, budget)
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
        raise invalid(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    assert isinstance(role, str)
    parsed: Item = {
        **read_head(item, "message"),
        "role": role,
        "content": read_parts(item.get("content"), role, f"{path}.content"),
    }
    if item.get("phase") in ("commentary", "final_answer"):
        parsed["phase"] = item["phase"]
    return parsed


def _reasoning(item: Mapping[str, Any], path: str) -> Item:
    parsed = read_head(item, "reasoning", status=False)
    for key, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        texts = _reasoning_texts(item.get(key), f"{path}.{key}")
        parsed[key] = [{"type": kind, "text": text} for text in texts]
    if isinstance(item.get("encrypted_content"), str):
        parsed["encrypted_content"] = item["encrypted_content"]
    parsed["status"] = read_status(item)
    return parsed


def _reasoning_texts(parts: Any, path: str) -> list[str]:
    if parts is None:
        return []
    if isinstance(parts, str):
        return [parts]
    if not isinstance(parts, list):
        raise invalid(path, "must be a list of parts")
    texts: list[str] = []
    for position, part in enumerate(parts):
        kind = read_type(part, f"{path}[{position}]")
        if kind not in _REASONING_PARTS:
            raise unsupported_part(kind, f"{path}[{position}]")
        texts.append(read_string(part, "text", f"{path}[{position}]", empty=True))
    return texts


def _compaction(item: Mapping[str, Any], path: str, budget: Budget) -> Item:
    sealed = read_string(item, "encrypted_content", path)
    if unseal(sealed, f"{path}.encrypted_content", budget) is None:
        raise invalid(f"{path}.encrypted_content", "was not created by this server")
    return {**read_head(item, "compaction", status=False), "encrypted_content": sealed}


def _compaction_trigger(item: Mapping[str, Any], path: str) -> Item:
    return read_head(item, "compaction_trigger", status=False)


def _item_reference(item: Mapping[str, Any], path: str) -> Item:
    return {"type": "item_reference", "id": read_string(item, "id", path)}


_PARSERS: dict[str, Callable[[Mapping[str, Any], str], Item]] = {
    "message": _message,
    "reasoning": _reasoning,
    "item_reference": _item_reference,
    "compaction_trigger": _compaction_trigger,
    **client_items.PARSERS,
    **built_in_input.PARSERS,
}


# --------------------------------------------------------------------------- reading parsed items


def same_output(stored: Item, given: Item) -> bool:
    """Returns whether a client's item equals the model's output, so that its exact tokens can be replayed.

    Reasoning may be empty: clients that keep only ``encrypted_content`` strip it.
    """
    if stored["type"] != given["type"]:
        return False
    if client_calls.is_call(given):
        return client_calls.same_call(stored, given)
    if given["type"] in built_in_items.BUILT_IN_INPUT:
        return built_in_input.same_built_in(stored, given)
    if given["type"] == "reasoning":
        return item_text(given) in ("", item_text(stored))
    return (
        given["type"] == "message"
        and stored["role"] == given["role"] == "assistant"
        and item_text(stored) == item_text(given)
    )
