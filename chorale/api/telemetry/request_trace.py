"""The span of a request: an HTTP request, a response over a WebSocket, or a background response.

Attributes follow OpenTelemetry's conventions for HTTP servers and for generative AI, and vLLM's. They never
contain text of a prompt or an answer. Requests that only read (GET), and probes, have no span.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from starlette.types import Scope

from chorale.api.telemetry.generation_span import fail
from chorale.config.engine import ServerConfig
from chorale.tracing.context import CURRENT, IgnoredFields, RequestContext
from chorale.tracing.otel import Span, Tracer, Value
from chorale.tracing.record import RequestRecord

PROVIDER = "chorale"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/responses/compact": "chat",
    "/v1/messages": "chat",
    "/invocations": "chat",
}
_PROPAGATED = (b"traceparent", b"tracestate")


class TracedServer(Protocol):
    """The attributes of ``ServerState`` that spans use."""

    @property
    def config(self) -> ServerConfig: ...
    @property
    def model_names(self) -> tuple[str, ...]: ...
    @property
    def tracer(self) -> Tracer | None: ...


def begin_request(server: TracedServer, scope: Scope, request_id: str) -> RequestContext:
    """Makes this the task's current request and begins its span, which continues the client's trace."""
    span: Span | None = None
    if server.tracer is not None and (scope["type"] == "websocket" or scope["method"] == "POST"):
        headers = {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k in _PROPAGATED}
        method = "GET" if scope["type"] == "websocket" else "POST"
        facts = {"http.request.method": method, "url.scheme": scope.get("scheme", "http")}
        span = server.tracer.start(method, headers, facts, "server")
    context = RequestContext(request_id, span, ignored=_ignored(server))
    CURRENT.set(context)
    return context


def _ignored(server: TracedServer) -> IgnoredFields | None:
    return IgnoredFields() if server.config.unknown_fields == "warn" else None


def end_request(
    server: TracedServer, context: RequestContext, route: str, status: int, error: str | None
) -> None:
    """Ends the span of a request. ``route``: a path template; ``error``: the code of the error."""
    span, record = context.span, context.record
    if span is None or not span.is_recording:
        return
    operation = OPERATIONS.get(route)
    span.rename(f"POST {route}" if operation is None else f"{operation} {_model(server, record)}")
    span.set({"http.route": route, "http.response.status_code": status})
    span.set({"gen_ai.request.id": context.request_id})
    if operation is not None:
        span.set(_attributes(server, operation, record))
    error = error or record.error
    if error is not None and 400 <= status < 500:
        span.set({"error.type": error})  # a client error does not fail the span
    elif error is not None:
        fail(span, error)
    span.end()


def begin_background(server: TracedServer, response_id: str, *, resumed: bool) -> RequestContext:
    """Begins the span of a background response, as a child of the creating request's span.

    A response that another server began gets a new trace.
    """
    current = None if resumed else CURRENT.get()
    parent = None if current is None else current.span
    facts = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": PROVIDER}
    span: Span | None = None
    if parent is not None:
        span = parent.child("background response", facts)
    elif server.tracer is not None:
        span = server.tracer.start("background response", {}, facts, "internal")
    record = RequestRecord() if current is None else RequestRecord(current.record.model)
    request_id = response_id if current is None else current.request_id
    context = RequestContext(request_id, span, record, ignored=_ignored(server))
    CURRENT.set(context)
    return context


def end_background(server: TracedServer, context: RequestContext, error: str | None) -> None:
    span = context.span
    if span is not None and span.is_recording:
        span.set(_attributes(server, "chat", context.record))
        if (code := error or context.record.error) is not None:
            span.fail(code)
        span.end()


def _attributes(server: TracedServer, operation: str, record: RequestRecord) -> Mapping[str, Value | None]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model or server.model_names[0],
        "gen_ai.response.model": server.model_names[0] if record.rounds else None,
        **record.attributes(time.time()),
    }


def _model(server: TracedServer, record: RequestRecord) -> str:
    """Returns a served model name: names from clients would make the number of span names unbounded."""
    return record.model if record.model in server.model_names else server.model_names[0]
