"""Converts Anthropic messages (JSON objects) to harmony messages. Nothing is silently dropped.

Blocks of a user message become tool results and texts, in order. Those of an assistant message become
thinking (analysis), text (commentary if a call follows, else final) and calls. Plain-text documents and
search results become text; images and other documents are refused with their position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from chorale.api.reasoning_tokens import ReasoningReader
from chorale.errors import invalid, unsupported_content
from chorale.harmony.messages import FUNCTIONS, DeveloperContent, Message, function_call, tool_result
from chorale.harmony.vocab import Vocabulary
from chorale.requests.prompt import tool_name
from chorale.requests.readers import read_mapping, read_text

Block = Mapping[str, Any]
_ROLES = ("user", "assistant", "system")


def system_text(blocks: Sequence[Block] | None) -> str | None:
    """Returns the text of ``system``, with blank lines between its blocks."""
    return "\n\n".join(filter(None, _texts(blocks or [], "system"))) or None


class Converter:
    """Converts the messages of a request in order, and records the tool of each call."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._calls: dict[str, str] = {}  # tool_use id -> tool name
        self._reasoning = ReasoningReader(vocab)

    def convert(self, messages: Sequence[Block]) -> list[Message]:
        """Converts all messages. Raises ``RequestError`` naming the message and block."""
        found: list[Message] = []
        for position, message in enumerate(messages):
            path, role = f"messages[{position}]", message.get("role")
            if role not in _ROLES:
                raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
            if role == "assistant":
                found += self._assistant(blocks_of(message, path), path)
            elif role == "user":
                found += self._user(blocks_of(message, path), path)
            else:
                found.append(Message("developer", DeveloperContent(_content(message, path))))
        return found

    # ------------------------------------------------------------------ assistant

    def _assistant(self, blocks: Sequence[Block], path: str) -> list[Message]:
        last_call = max((i for i, block in enumerate(blocks) if block["type"] == "tool_use"), default=-1)
        found: list[Message] = []
        for index, block in enumerate(blocks):
            where, kind = f"{path}.content[{index}]", block["type"]
            if kind == "tool_use":
                found.append(self._call(block, where))
            elif kind == "thinking":
                found += self._thinking(block, where)
            elif kind != "redacted_thinking":  # encrypted by another server, so not readable
                channel = "commentary" if index < last_call else "final"
                found.append(Message("assistant", _text(block, where), channel=channel))
        return found

    def _thinking(self, block: Block, path: str) -> list[Message]:
        """Converts thinking to its signature's tokens, or to its text if the signature does not fit."""
        text = read_text(block, "thinking", path)
        read = self._reasoning.read(block.get("signature"), text, f"{path}.signature")
        if read is not None:
            return [Message("assistant", text, channel="analysis", token_ids=read[1])]
        return [Message("assistant", text, channel="analysis")] if text else []

    def _call(self, block: Block, path: str) -> Message:
        call_id = read_text(block, "id", path)
        name = tool_name(block.get("name"), f"{path}.name")
        given = read_mapping(block, "input", path)
        self._calls[call_id] = name
        return function_call(name, msgspec.json.encode(given).decode())

    # ------------------------------------------------------------------ user

    def _user(self, blocks: Sequence[Block], path: str) -> list[Message]:
        """Converts a user message; adjacent texts become one message."""
        found: list[Message] = []
        texts: list[str] = []
        for index, block in enumerate(blocks):
            where = f"{path}.content[{index}]"
            if block["type"] != "tool_result":
                texts.append(_text(block, where))
                continue
            if texts:
                found.append(Message("user", "\n\n".join(texts)))
                texts = []
            found.append(self._result(block, where))
        if texts or not found:
            found.append(Message("user", "\n\n".join(texts)))
        return found

    def _result(self, block: Block, path: str) -> Message:
        call_id = block.get("tool_use_id")
        name = self._calls.get(call_id) if isinstance(call_id, str) else None
        if name is None:
            raise invalid(
                f"{path}.tool_use_id", f"{repr(call_id)[:80]} is not the id of a tool_use block before it"
            )
        text = "" if block.get("content") is None else _content(block, path)
        if block.get("is_error") is True:
            text = f"Error: {text}"
        return tool_result(f"{FUNCTIONS}.{name}", text)


# --------------------------------------------------------------------------- blocks


def blocks_of(message: Block, path: str) -> list[Block]:
    """Returns ``content`` as a list of blocks, each with a type."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(f"{path}.content", "must be a string or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            where = f"{path}.content[{index}]"
            raise invalid(where, "must be an object with a type")
    return content


def _text(block: Block, path: str) -> str:
    """Returns the text of a text block, or of a block that can be converted to text."""
    kind = block.get("type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise unsupported_content(
            path, f"blocks of type {str(kind)[:64]!r} are not supported: the model takes text only"
        )
    return reader(block, path)


def _texts(blocks: Sequence[Block], path: str) -> list[str]:
    return [_text(block, f"{path}[{index}]") for index, block in enumerate(blocks)]


def _content(block: Block, path: str) -> str:
    """Returns the text of the blocks in ``content``."""
    return "\n\n".join(_texts(blocks_of(block, path), f"{path}.content"))


def _document(block: Block, path: str) -> str:
    """Returns the text of a plain-text document or of text blocks, after its title and context."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("text", "content"):
        raise unsupported_content(
            f"{path}.source",
            f"documents of type {str(kind)[:64]!r} are not supported: the model takes text",
        )
    if kind == "text":
        text = read_text(source, "data", f"{path}.source")
    else:
        text = _content(source, f"{path}.source")
    return _titled([block.get("title"), block.get("context")], text)


def _search_result(block: Block, path: str) -> str:
    return _titled([block.get("title"), block.get("source")], _content(block, path))


def _titled(heads: Sequence[Any], text: str) -> str:
    return "\n\n".join([*(head for head in heads if isinstance(head, str) and head), text])


_READERS: dict[str, Callable[[Block, str], str]] = {
    "text": lambda block, path: read_text(block, "text", path),
    "document": _document,
    "search_result": _search_result,
    "tool_reference": lambda block, path: read_text(block, "tool_name", path),
}
