"""JSON-RPC as used by MCP: messages, their limits, and the supported protocol revisions.

Source: modelcontextprotocol.io, revisions 2024-11-05 to 2025-11-25 (those with the ``initialize`` handshake;
servers of the stateless revision 2026-07-28 that are built with the public SDKs accept the handshake too).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from chorale.harmony.json_shape import LARGEST, shape_of
from chorale.harmony.json_text import MAX_DEPTH, loads
from chorale.tools.errors import ToolError

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # newest first
MAX_MESSAGE_BYTES = 4 * 2**20
# A parser holds the interpreter's lock for a whole message: 20 ms for one of this size.
MAX_VALUES = 65_536
_MOST = replace(LARGEST, depth=MAX_DEPTH, values=MAX_VALUES, strings=MAX_VALUES // 2)
_LARGE = 32 * 1024  # bytes; a smaller message cannot exceed these counts

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602

Message = dict[str, Any]


class McpError(ToolError):
    """A server failed, refused a request, or violated the protocol."""


def request(number: int, method: str, params: Mapping[str, Any] | None = None) -> Message:
    message: Message = {"jsonrpc": "2.0", "id": number, "method": method}
    return message | {"params": dict(params)} if params is not None else message


def notification(method: str, params: Mapping[str, Any] | None = None) -> Message:
    message: Message = {"jsonrpc": "2.0", "method": method}
    return message | {"params": dict(params)} if params is not None else message


def success(number: Any, result: Mapping[str, Any]) -> Message:
    return {"jsonrpc": "2.0", "id": number, "result": dict(result)}


def failure(number: Any, code: int, message: str) -> Message:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


def encode(message: Message) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def decode(data: bytes | str) -> list[Message]:
    """Parses the messages in a body (older revisions have batches). Raises ``McpError`` for anything else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise McpError(f"the server sent a message of more than {MAX_MESSAGE_BYTES} bytes")
    if len(data) > _LARGE:
        excess = shape_of(data.encode() if isinstance(data, str) else data, _MOST).excess(_MOST)
        if excess not in (None, "depth"):  # the parser finds the depth
            raise McpError(f"the server sent a message with too many {excess}")
    try:
        value = loads(data)
    except (ValueError, RecursionError):
        raise McpError("the server sent a message that is not JSON") from None
    messages = value if isinstance(value, list) else [value]
    if not all(isinstance(message, dict) for message in messages):
        raise McpError("the server sent a message that is not JSON-RPC")
    return messages


def result_of(message: Message) -> dict[str, Any]:
    """Returns the result of a response. Raises ``McpError`` with the server's error."""
    error = message.get("error")
    if error is not None:
        text = error.get("message") if isinstance(error, dict) else None
        raise McpError(f"the server answered with an error: {str(text or 'no message')[:2000]}")
    result = message.get("result")
    if not isinstance(result, dict):
        raise McpError("the server answered without a result")
    return result


def is_response(message: Message) -> bool:
    return "method" not in message and ("result" in message or "error" in message)
