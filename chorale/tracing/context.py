"""The current request, for logs and traces: its id, its span, and the work of engines for it.

The server sets ``CURRENT`` for each request; tasks that it starts inherit it. Spans are created by a
``Tracer`` (``otel``); without one there are none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from chorale.tracing.otel import Span, Value
from chorale.tracing.record import RequestRecord


class IgnoredFields:
    """The first names of a request's unknown fields (``ignored``)."""

    MOST = 20
    __slots__ = ("names",)

    def __init__(self) -> None:
        self.names: dict[str, None] = {}  # in the order of the request

    def add(self, name: str) -> bool:
        """Returns whether it is among the first."""
        if len(self.names) < self.MOST:
            self.names[name] = None
        return name in self.names


@dataclass(frozen=True, slots=True)
class RequestContext:
    """``span`` is the innermost one; None while the request is not traced. ``is_inner``: it is an
    internal generation, such as a summary, whose choices are not the request's.
    ``ignored``: None if unknown fields are refused.
    """

    request_id: str
    span: Span | None = None
    record: RequestRecord = field(default_factory=RequestRecord)
    is_inner: bool = False
    ignored: IgnoredFields | None = None


CURRENT: ContextVar[RequestContext | None] = ContextVar("chorale_request", default=None)


def recording() -> RequestContext | None:
    """Returns the current request, if its trace is recorded."""
    context = CURRENT.get()
    return context if context is not None and context.span is not None and context.span.is_recording else None


def outgoing_headers() -> dict[str, str]:
    """Returns the header with which another service continues the trace; none without a trace.

    ``tracestate`` is left out: it may hold data of the client's vendor.
    """
    context = CURRENT.get()
    if context is None or context.span is None:
        return {}
    parent = context.span.headers().get("traceparent")
    return {} if parent is None else {"traceparent": parent}


def name_response(response_id: str) -> None:
    """Records the id of the response that the client gets, if it is not that of the engine's request."""
    context = recording()
    if context is not None:
        context.record.response_id = response_id


def choice_ended(reason: str, error: str | None) -> None:
    """Records the end of a choice of the current request. ``error``: the code of its error."""
    context = recording()
    if context is not None and not context.is_inner:
        context.record.finish_reasons.append(reason)
        context.record.error = error or context.record.error


@contextlib.contextmanager
def within(
    name: str, attributes: Mapping[str, Value | None], *, is_inner: bool = False
) -> Iterator[Span | None]:
    """Runs its body in a child span, which records an exception as an error. Yields None without a trace."""
    context = recording()
    if context is None or context.span is None:
        yield None
        return
    span = context.span.child(name, attributes)
    CURRENT.set(replace(context, span=span, is_inner=is_inner or context.is_inner))
    try:
        yield span
    except BaseException as error:
        left = isinstance(error, GeneratorExit | asyncio.CancelledError)
        span.fail("cancelled" if left else type(error).__name__)
        raise
    finally:
        span.end()
        # Not ``reset``: a generator may be closed in another context than the one that it began in.
        CURRENT.set(context)
