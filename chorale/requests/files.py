"""Text files within a request. Other kinds of files are refused."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from chorale.errors import unsupported_content

_DATA_URL = re.compile(r"data:(?P<type>[\w.+/-]*)(?:;[\w=.+-]+)*;base64,", re.ASCII)
_PIECE = 2**20  # characters, a multiple of four


def inline_file(file: Mapping[str, Any], path: str, kind: str) -> str:
    """Returns name and content of a file whose ``file_data`` is UTF-8 text: base64, optionally a data URL.

    ``kind``: the type of the part, for errors. Raises ``RequestError`` naming ``path``.
    """
    data = file.get("file_data")
    if not isinstance(data, str):
        raise unsupported_content(
            path, f"parts of type {kind!r} need file_data: ids and URLs are not fetched"
        )
    url = _DATA_URL.match(data)
    if url is not None:
        data = data[url.end() :]
    try:
        text = _from_base64(data).decode("utf-8")
    except (binascii.Error, ValueError):
        text = "\x00"
    if "\x00" in text:
        raise unsupported_content(
            path, f"the {kind!r} is not a text file; the model takes text only (base64 of UTF-8)"
        )
    name = file.get("filename")
    return f"{name}\n\n{text}" if isinstance(name, str) and name else text


def _from_base64(data: str) -> bytes:
    """Decodes in pieces, so that other threads run in between. Raises ``ValueError`` for invalid base64."""
    if "=" in data[:-2]:
        raise ValueError("padding before the end")
    pieces = (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))
    return b"".join(base64.b64decode(piece, validate=True) for piece in pieces)
