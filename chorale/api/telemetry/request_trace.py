"""The span of a request: an HTTP request, a response over a WebSocket, or one in the background.

Attributes are those of OpenTelemetry's conventions for HTTP servers and for generative AI, and vLLM's. None
holds text of a prompt or an answer. Requests that only read (GET), and probes, have no span.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Scope

from chorale.api.state import ServerState
from chorale.api.telemetry.traced_stream import fail
from chorale.tracing.context import CURRENT, IgnoredFields, RequestContext, Span, Value
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


@dataclass(frozen=True, slots=True)
class End:
    """The end of a request. ``status``: the HTTP status; ``error``: the code of its error."""

    status: int
    error: str | None = None


def begin_request(state: ServerState, scope: Scope, request_id: str) -> RequestContext:
    """Makes the request the current one of this task, and begins its span, which continues the client's."""
    span: Span | None = None
    if state.tracer is not None and (scope["type"] == "websocket" or scope["method"] == "POST"):
        headers = {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k in _PROPAGATED}
        method = "GET" if scope["type"] == "websocket" else "POST"
        facts = {"http.request.method": method, "url.scheme": scope.get("scheme", "http")}
        span = state.tracer.start(method, headers, facts, "server")
    context = RequestContext(request_id, span, ignored=_ignored(state))
    CURRENT.set(context)
    return context


def _ignored(state: ServerState) -> IgnoredFields | None:
    return IgnoredFields() if state.config.unknown_fields == "warn" else None


def end_request(state: ServerState, context: RequestContext, route: str, end: End) -> None:
    """Ends the span of a request whose route is ``route`` (a path template)."""
    span, record = context.span, context.record
    if span is None or not span.is_recording:
        return
    operation = OPERATIONS.get(route)
    span.rename(f"POST {route}" if operation is None else f"{operation} {_model(state, record)}")
    span.set({"http.route": route, "http.response.status_code": end.status})
    span.set({"gen_ai.request.id": context.request_id})
    if operation is not None:
        span.set(_attributes(state, operation, record))
    error = end.error or record.error
    if error is not None and 400 <= end.status < 500:
        span.set({"error.type": error})  # the client's fault
    elif error is not None:
        fail(span, error)
    span.end()


def begin_background(state: ServerState, response_id: str, *, resumed: bool) -> RequestContext:
    """Begins the span of a background response, below that of the request that created it.

    A response that another server began has a trace of its own.
    """
    current = None if resumed else CURRENT.get()
    parent = None if current is None else current.span
    facts = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": PROVIDER}
    span: Span | None = None
    if parent is not None:
        span = parent.child("background response", facts)
    elif state.tracer is not None:
        span = state.tracer.start("background response", {}, facts, "internal")
    record = RequestRecord() if current is None else RequestRecord(current.record.model)
    request_id = response_id if current is None else current.request_id
    context = RequestContext(request_id, span, record, ignored=_ignored(state))
    CURRENT.set(context)
    return context


def end_background(state: ServerState, context: RequestContext, error: str | None) -> None:
    span = context.span
    if span is not None and span.is_recording:
        span.set(_attributes(state, "chat", context.record))
        if (code := error or context.record.error) is not None:
            span.fail(code)
        span.end()


def _attributes(state: ServerState, operation: str, record: RequestRecord) -> Mapping[str, Value | None]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model or state.model_names[0],
        "gen_ai.response.model": state.model_names[0] if record.rounds else None,
        **record.attributes(time.time()),
    }


def _model(state: ServerState, record: RequestRecord) -> str:
    """Returns a served name: a client's own would make as many names of spans as clients like."""
    return record.model if record.model in state.model_names else state.model_names[0]
