"""Parses request bodies into dicts and validates them with request models.

Limits apply before memory is allocated: nesting and counts of values are determined on the raw bytes, before
a JSON parser runs (``json_shape``). Parsing is strict for every endpoint: UTF-8 only, no NaN or infinity (nor
numbers that overflow to it), no lone surrogates, no duplicate keys. ``request_limits`` enforces limits of
size and time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from chorale.api.http.offload import beside
from chorale.api.limits import SIZES
from chorale.config.engine import ServerConfig
from chorale.errors import RequestError, UnsupportedMediaTypeError
from chorale.harmony.json_shape import LARGEST, shape_of
from chorale.tracing.ignored import unknown_field

Model = TypeVar("Model", bound=BaseModel)

Result = TypeVar("Result")

# Larger bodies are parsed and validated in a thread, so that other streams continue. For smaller ones the
# switch to a thread would cost more than parsing, and they can exceed no limit except the depth.
THREAD_BYTES = 32 * 1024
_CHARSETS = ("utf-8", "utf8", "us-ascii")
_MAX_FAULTS = 8
_MAX_DIGITS = 400  # maximum length of an integer, including its sign
_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 32  # a body without this cannot contain an overlong integer


async def read_json(request: Request, config: ServerConfig) -> dict[str, Any]:
    """Returns the request's JSON object.

    Raises ``RequestError``: 400, 408, 413, or 415 for another media type.
    """
    return await read_as(request, config, lambda data: data)


async def read_as(
    request: Request, config: ServerConfig, parse: Callable[[dict[str, Any]], Result]
) -> Result:
    """Applies ``parse`` to the request's JSON object, in a thread for a large body.

    Raises the errors of ``read_json`` and ``parse``.
    """
    _check_form(request)
    return await parse_bytes(await request.body(), config, parse)


def _check_form(request: Request) -> None:
    media_type, *parameters = (
        part.strip().lower() for part in request.headers.get("content-type", "").split(";")
    )
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaTypeError("the body must be application/json", code="unsupported_media_type")
    for parameter in parameters:
        name, _, charset = parameter.partition("=")
        if name.strip() == "charset" and charset.strip(' "') not in _CHARSETS:
            raise UnsupportedMediaTypeError(
                f"charset={charset[:64]} is not supported; JSON must be UTF-8", code="unsupported_media_type"
            )
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaTypeError(
            f"Content-Encoding: {encoding[:64]!r} is not supported; send the body uncompressed",
            code="unsupported_content_encoding",
        )


async def parse_bytes(raw: bytes, config: ServerConfig, parse: Callable[[dict[str, Any]], Result]) -> Result:
    """Applies ``parse`` to the JSON object in ``raw``. Raises ``RequestError``."""
    return await beside(
        lambda: parse(parse_object(raw, config.max_json_depth)), heavy=len(raw) > THREAD_BYTES
    )


def parse_object(raw: bytes, max_depth: int) -> dict[str, Any]:
    """Parses strict JSON (see the module's docstring).

    Raises ``RequestError``: ``invalid_json`` or a more specific code.
    """
    text = _decoded(raw)
    if len(raw) > THREAD_BYTES or raw.count(b"[") + raw.count(b"{") > max_depth:
        _check_shape(raw, max_depth)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_integer if _LONG_NUMBER in raw.translate(_AS_ZEROS) else None,
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    if "\\u" in text:
        _refuse_half_pairs(raw)
    return value


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 (byte {error.start})", code="invalid_utf8") from None


def _check_shape(raw: bytes, max_depth: int) -> None:
    most = replace(LARGEST, depth=max_depth)
    excess = shape_of(raw, most).excess(most)
    if excess == "depth":
        raise RequestError(f"the JSON is nested more than {max_depth} levels deep", code="json_too_deep")
    if excess is not None:
        size = SIZES[f"json_{excess}"]
        raise RequestError(
            f"the JSON has more than {size.max} {size.unit} ({size.doc})", code="json_too_large"
        )


def _refuse_half_pairs(raw: bytes) -> None:
    """Raises ``RequestError`` for lone surrogates, which msgspec detects and ``json`` does not."""
    try:
        msgspec.json.decode(raw)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        raise RequestError(
            "the body is not valid JSON: a string contains half of a surrogate pair", code="invalid_json"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object contains a key twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _integer(literal: str) -> int:
    if len(literal) > _MAX_DIGITS:  # int() is quadratic in the digits
        raise ValueError("a number is too large")
    return int(literal)


# --------------------------------------------------------------------------- models


_CODES = {
    "missing": "missing_required_parameter",
    "greater_than": "below_min_value",
    "greater_than_equal": "below_min_value",
    "less_than": "above_max_value",
    "less_than_equal": "above_max_value",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
    "too_long": "array_above_max_length",
    "too_short": "array_below_min_length",
}


def parse_model(model: type[Model], data: dict[str, Any]) -> Model:
    """Validates ``data``. Removes its unknown fields if they are ignored.

    Raises a ``RequestError`` that lists all faults; ``param`` is the first one's path.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        if not any(fault["type"] == "extra_forbidden" for fault in _faults(error)):
            raise _request_error(error, data) from None
        _drop_unknown(error, data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _request_error(error, data) from None


def _drop_unknown(error: ValidationError, data: Any) -> None:
    for fault in _faults(error):
        if fault["type"] == "extra_forbidden":
            *steps, name = fault["loc"]
            unknown_field(_param(fault["loc"], data, fault["type"])[0])
            inner = data
            for step in steps:
                inner = inner[step]
            del inner[name]


def _faults(error: ValidationError) -> list[ErrorDetails]:
    return error.errors(include_url=False, include_context=False, include_input=False)


def _request_error(error: ValidationError, data: dict[str, Any]) -> RequestError:
    by_field: dict[Any, tuple[int, str, str, str]] = {}
    for fault in _faults(error):
        path, depth = _param(fault["loc"], data, fault["type"])
        # A union reports faults for each variant; report only the variant that matched furthest.
        head = fault["loc"][:1]
        if head not in by_field or depth > by_field[head][0]:
            by_field[head] = (depth, path, fault["msg"], fault["type"])
    chosen = list(by_field.values())
    lines = [f"{path}: {message}" if path else message for _, path, message, _ in chosen[:_MAX_FAULTS]]
    if len(chosen) > _MAX_FAULTS:
        lines.append(f"and {len(chosen) - _MAX_FAULTS} more")
    _, param, _, kind = chosen[0]
    return RequestError("; ".join(lines), param=param or None, code=_code(kind))


def _code(kind: str) -> str:
    default = "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"
    return _CODES.get(kind, default)


def _param(location: Sequence[int | str], data: Any, kind: str) -> tuple[str, int]:
    """Returns the path in the body, such as "messages[0].content", and its number of steps.

    pydantic's locations also contain names of union variants and validators, which are left out.
    """
    path, depth, value = "", 0, data
    for position, step in enumerate(location):
        last = position == len(location) - 1
        if isinstance(step, int) and isinstance(value, list) and 0 <= step < len(value):
            path, depth, value = f"{path}[{step}]", depth + 1, value[step]
        elif (
            isinstance(step, str)
            and isinstance(value, dict)
            and (step in value or (last and kind == "missing"))
        ):
            path, depth = f"{path}.{step[:64]}" if path else step[:64], depth + 1
            value = value.get(step)
    return path, depth
