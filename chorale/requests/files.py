"""Files within a request: text is read here, PDF files by the server before. Other kinds are refused."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from chorale.errors import invalid, unsupported_content

_DATA_URL = re.compile(r"data:(?P<type>[\w.+/-]*)(?:;[\w=.+-]+)*;base64,", re.ASCII)
_PIECE = 2**20  # characters, a multiple of four
_KINDS = {
    "file": "text",
    "input_file": "input_text",
}  # types of parts with a file, and of those with its text


def inline_file(file: Mapping[str, Any], path: str, kind: str) -> str:
    """Returns name and content of a file whose ``file_data`` is UTF-8 text: base64, optionally a data URL.

    ``kind``: the type of the part, for errors. Raises ``RequestError`` naming ``path``.
    """
    data = file.get("file_data")
    if not isinstance(data, str):
        raise unsupported_content(
            path,
            f"parts of type {kind!r} need file_data: URLs are not fetched, and uploaded files (file_id) "
            "serve batches only",
        )
    try:
        text = _from_base64(_without_prefix(data)).decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\x00"
    except (binascii.Error, ValueError):
        step = ".file" if kind == "file" else ""
        raise invalid(f"{path}{step}.file_data", "not valid base64") from None
    if "\x00" in text:
        raise unsupported_content(
            path, f"the {kind!r} is not a text file; the model takes text only (base64 of UTF-8)"
        )
    return _with_name(file, text)


def _with_name(file: Mapping[str, Any], text: str) -> str:
    name = file.get("filename")
    return f"{name}\n\n{text}" if isinstance(name, str) and name else text


class PdfPart(NamedTuple):
    """A part of a message that holds a PDF file."""

    part: dict[str, Any]
    file: Mapping[str, Any]
    param: str  # of the file's data

    def data(self) -> bytes:
        """Returns the file. Raises ``RequestError``."""
        try:
            return _from_base64(_without_prefix(self.file["file_data"]))
        except (binascii.Error, ValueError):
            raise invalid(self.param, "not valid base64") from None

    def become(self, text: str) -> None:
        """Turns the part into one with the file's name and ``text``."""
        text = _with_name(self.file, text)
        kind = _KINDS[self.part["type"]]
        self.part.clear()
        self.part.update(type=kind, text=text)


def pdf_parts(messages: Sequence[Any], path: str) -> Iterator[PdfPart]:
    """Yields the PDF files in chat messages or in items of Responses."""
    for position, message in enumerate(messages):
        for key in ("content", "output"):
            parts = message.get(key) if isinstance(message, Mapping) else None
            for place, part in enumerate(parts if isinstance(parts, list) else ()):
                if not isinstance(part, dict) or part.get("type") not in ("file", "input_file"):
                    continue
                step = ".file" if part["type"] == "file" else ""
                file = part.get("file") if step else part
                if isinstance(file, Mapping) and _is_pdf(file):
                    yield PdfPart(part, file, f"{path}[{position}].{key}[{place}]{step}.file_data")


def _is_pdf(file: Mapping[str, Any]) -> bool:
    data = file.get("file_data")
    if not isinstance(data, str):
        return False
    url = _DATA_URL.match(data)
    if url is not None and url["type"].lower() == "application/pdf":
        return True
    try:
        return _from_base64(_without_prefix(data[:400])[:8]).startswith(b"%PDF-")
    except (binascii.Error, ValueError):
        return False


def _without_prefix(data: str) -> str:
    url = _DATA_URL.match(data)
    return data if url is None else data[url.end() :]


def _from_base64(data: str) -> bytes:
    """Decodes in pieces, so that other threads run in between. Raises ``ValueError`` for invalid base64."""
    if "=" in data[:-2]:
        raise ValueError("padding before the end")
    pieces = (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))
    return b"".join(base64.b64decode(piece, validate=True) for piece in pieces)
