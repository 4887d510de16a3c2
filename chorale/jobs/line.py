"""One line of a batch: the request {custom_id, method, url, body}, and the record of its answer.

Both have the format of OpenAI's Batch API. The body of a request is kept as the bytes of the file: the
endpoint parses it with its own limits and errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from chorale.errors import ChoraleError, RequestError
from chorale.harmony.json_shape import LARGEST, shape_of
from chorale.ids import new_id
from chorale.tracing.ignored import warnings

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_CUSTOM_ID = 1024  # characters
MAX_LINE_BYTES = 16 * 2**20
LARGE = 32 * 1024  # bytes; parsing a longer line on the event loop would delay other requests
_SHOWN = 200  # most characters of a client's string in an error message


@dataclass(frozen=True, slots=True)
class Line:
    """A valid line. ``body``: the request as a JSON object. ``model``: the model that it names."""

    custom_id: str
    url: str
    body: bytes
    model: str | None = None


class LineError(RequestError, code="invalid_line"):
    """A line that cannot be sent. ``custom_id``: the line's id, or None if it cannot be read."""

    custom_id: str | None = None


class _Request(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Fields(msgspec.Struct):
    """The fields of a body that decide whether and how it is sent."""

    model: Any = None
    stream: Any = None
    background: Any = None


_request = msgspec.json.Decoder(_Request)
_fields = msgspec.json.Decoder(_Fields)


def parse_line(
    raw: bytes, *, endpoints: tuple[str, ...] = ENDPOINTS, max_bytes: int = MAX_LINE_BYTES
) -> Line:
    """Returns the request of a line. Raises ``LineError``, with OpenAI's code if there is one."""
    if len(raw) > max_bytes:
        raise LineError(f"the line is larger than {max_bytes} bytes", code="line_too_large")
    if len(raw) > LARGE and (excess := shape_of(raw, LARGEST).excess(LARGEST)) is not None:
        raise LineError(f"the line has too many {excess} for one request", code="json_too_large")
    try:
        found = _request.decode(raw)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        raise LineError(_why_unreadable(raw), code="invalid_json_line") from None
    try:
        return _checked(found, endpoints)
    except LineError as error:
        error.custom_id = found.custom_id if isinstance(found.custom_id, str) else None
        raise


def _why_unreadable(raw: bytes) -> str:
    try:
        msgspec.json.decode(raw, type=msgspec.Raw)
    except RecursionError:
        return "the line is nested too deeply"
    except (ValueError, msgspec.MsgspecError) as error:
        return f"the line is not valid JSON: {error}"
    return f"the line must be a JSON object, not {raw.strip()[:_SHOWN].decode()!r}"


def _checked(found: _Request, endpoints: tuple[str, ...]) -> Line:
    for name in ("custom_id", "method", "url", "body"):
        if getattr(found, name) is None or (name == "body" and bytes(found.body) in (b"", b"null")):
            raise LineError(f"{name} is missing", param=name, code="missing_required_parameter")
    for name in ("custom_id", "method", "url"):
        if not isinstance(getattr(found, name), str):
            raise LineError(f"{name} must be a string", param=name, code="invalid_type")
    if not 1 <= len(found.custom_id) <= MAX_CUSTOM_ID:
        raise LineError(f"custom_id must have 1 to {MAX_CUSTOM_ID} characters", param="custom_id")
    if found.method != "POST":
        raise LineError(f"method must be POST, not {found.method[:_SHOWN]!r}", param="method")
    if found.url not in endpoints:
        raise LineError(
            f"url {found.url[:_SHOWN]!r} is not supported here; supported: {', '.join(endpoints)}",
            param="url",
            code="invalid_url",
        )
    body = bytes(found.body)
    fields = _fields_of(body)
    return Line(
        custom_id=found.custom_id,
        url=found.url,
        body=body,
        model=fields.model if isinstance(fields.model, str) else None,
    )


def _fields_of(body: bytes) -> _Fields:
    """Returns the fields of a body. Raises ``LineError`` if the answer would not be a single object."""
    try:
        fields = _fields.decode(body)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        raise LineError("body must be a JSON object", param="body", code="invalid_type") from None
    for name in ("stream", "background"):
        if getattr(fields, name):
            raise LineError(
                f"body.{name}: a line of a batch is answered by one object; leave {name} out",
                param=f"body.{name}",
                code="unsupported_value",
            )
    return fields


# --------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to a line's request. ``body``: JSON on one line. ``ignored``: value of the header that
    names the unknown fields of the request."""

    status: int
    request_id: str
    body: bytes
    retry_after: float | None = None  # seconds
    ignored: str = ""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Record:
    """The output line for a line of the input.

    A request that was answered has ``answer``, even if that is an HTTP error. One that could not be sent or
    got no answer has ``fault``. An invalid line also has ``status`` 400, as in ``vllm run-batch``.
    """

    custom_id: str | None
    answer: Answer | None = None
    fault: ChoraleError | None = None
    status: int | None = None
    id: str = field(default_factory=lambda: new_id("batch_req"))

    @property
    def ok(self) -> bool:
        return self.answer is not None and self.answer.ok

    def encode(self) -> bytes:
        """Returns the record as JSON without a line end."""
        error = self.fault
        fault = None if error is None else {"code": str(error.code), "message": error.message}
        record: dict[str, Any] = {
            "id": self.id,
            "custom_id": self.custom_id,
            "response": self._response(),
            "error": fault,
        }
        if self.answer is not None and self.answer.ignored:
            record["warnings"] = warnings(self.answer.ignored)
        return msgspec.json.encode(record)

    def _response(self) -> dict[str, Any] | None:
        if self.answer is not None:
            return {
                "status_code": self.answer.status,
                "request_id": self.answer.request_id,
                "body": msgspec.Raw(self.answer.body),
            }
        if self.status is not None:
            return {"status_code": self.status, "request_id": new_id("req"), "body": None}
        return None


def refused(error: LineError) -> Record:
    """Returns the record of an invalid line."""
    return Record(error.custom_id, fault=error, status=error.status)
