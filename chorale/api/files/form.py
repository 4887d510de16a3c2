"""A multipart form with one file, read as a stream: the file is never in memory as a whole.

python-multipart parses the syntax; this module limits the number and size of parts and headers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from chorale.errors import PayloadTooLargeError, RequestError, UnsupportedMediaTypeError

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it logs each malformed form

MAX_PARTS = 16
MAX_VALUE_BYTES = 4096
MAX_HEADERS = 8  # headers of a form part
MAX_HEADER_BYTES = 4096
FILE = "file"


def boundary_of(content_type: str) -> bytes:
    """Returns the boundary of a form. Raises ``RequestError``."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise UnsupportedMediaTypeError("the body must be multipart/form-data", code="unsupported_media_type")
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise RequestError("the Content-Type has no valid boundary", code="invalid_form")
    return boundary


@dataclass(slots=True)
class FormData:
    """The text fields, and the file's name and size in bytes. ``size`` is None without a file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    size: int | None = None


_Event = dict[str, bytes] | bytes | None  # the headers of a part, its data, its end


class Form:
    """Reads one form, whose file may have at most ``max_file_bytes``."""

    def __init__(self, body: AsyncIterator[bytes], boundary: bytes, max_file_bytes: int) -> None:
        self._body, self._max_file_bytes = body, max_file_bytes
        self._events: deque[_Event] = deque()
        self._name, self._value = bytearray(), bytearray()  # name and value of the current header
        self._headers: dict[str, bytes] = {}
        self._num_parts = 0
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._name.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": lambda: self._events.append(self._headers),
                "on_part_data": lambda data, start, end: self._events.append(bytes(data[start:end])),
                "on_part_end": lambda: self._events.append(None),
                "on_end": self._end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )

    async def read(self, write: Callable[[AsyncIterator[bytes]], Awaitable[int]]) -> FormData:
        """Reads the form and its file. Raises ``RequestError``, and the errors of ``write(pieces)``."""
        form = FormData()
        events = self._parse()
        async for event in events:
            assert isinstance(event, dict), "a part was not read"
            options = parse_options_header(event.get("content-disposition", b""))[1]
            name = options.get(b"name", b"").decode("utf-8", "replace")
            if name == FILE:
                if form.size is not None:
                    raise RequestError("the form has more than one file", param=FILE, code="invalid_form")
                form.filename = _label(options.get(b"filename", b""))
                form.size = await write(self._file(events))
            elif name in form.fields:
                raise RequestError(
                    f"the form contains {name[:64]!r} twice", param=name[:64], code="invalid_form"
                )
            else:
                form.fields[name] = await self._text(name, events)
        if not self._ended:
            raise RequestError("the form ends early", code="invalid_form")
        return form

    async def _file(self, events: AsyncGenerator[_Event]) -> AsyncGenerator[bytes]:
        size = 0
        async for event in events:
            if not isinstance(event, bytes):
                return
            size += len(event)
            if size > self._max_file_bytes:
                raise PayloadTooLargeError(
                    f"the file is larger than {self._max_file_bytes} bytes", param=FILE, code="file_too_large"
                )
            yield event
        raise RequestError("the form ends early", code="invalid_form")

    async def _text(self, name: str, events: AsyncGenerator[_Event]) -> str:
        value = b""
        async for event in events:
            if not isinstance(event, bytes):
                break
            value += event
            if len(value) > MAX_VALUE_BYTES:
                raise RequestError(f"{name[:64]!r} is too long", param=name[:64], code="invalid_form")
        return value.decode("utf-8", "replace")

    async def _parse(self) -> AsyncGenerator[_Event]:
        async for data in self._body:
            if self._ended:
                continue  # data after the last boundary is ignored
            try:
                self._parser.write(data)
            except FormParserError as error:
                raise RequestError(f"the form is malformed: {error}", code="invalid_form") from None
            while self._events:
                yield self._events.popleft()

    # ------------------------------------------------------------------ the parser's callbacks

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise RequestError(f"the form has more than {MAX_PARTS} parts", code="invalid_form")
        self._headers = {}

    def _end_header(self) -> None:
        self._headers[self._name.decode("latin-1").lower()] = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _end(self) -> None:
        self._ended = True


def _label(filename: bytes) -> str:
    """Returns the last component of a client's file name. It is only shown, never used as a path."""
    name = filename.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(letter for letter in name if letter.isprintable())[:255] or "file"
