"""An OTLP/HTTP collector for tests, which decodes the posted spans."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tests.support.http_server import Asked, HttpServer, Reply


@dataclass(frozen=True)
class Exported:
    """One span."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    status: int  # 2 for an error
    seconds: float


class Collector(HttpServer):
    """``delay``: seconds before each answer; ``status``: HTTP status of the answers."""

    def __init__(self, *, status: int = 200, delay: float = 0.0) -> None:
        super().__init__()
        self._status, self._delay = status, delay
        self.spans: list[Exported] = []
        self.num_posts = 0
        self.headers: list[dict[str, str]] = []

    def answer(self, asked: Asked) -> Reply:
        self.headers.append({key.lower(): value for key, value in asked.headers.items()})
        self.num_posts += 1
        time.sleep(self._delay)
        if asked.path != "/v1/traces":
            return Reply(404)
        if self._status == 200:
            self.spans += decode(asked.body)
        return Reply(self._status)

    def named(self, start: str) -> list[Exported]:
        return [span for span in self.spans if span.name.startswith(start)]

    def servers(self) -> list[Exported]:
        return [span for span in self.spans if span.kind == "server"]

    def children(self, parent: Exported) -> list[Exported]:
        return [span for span in self.spans if span.parent_id == parent.span_id]


KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")


def decode(body: bytes) -> list[Exported]:
    """Returns the spans of an ExportTraceServiceRequest, parsed with OTLP's own classes."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest.FromString(body)
    return [
        Exported(
            span.name,
            KINDS[span.kind],
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            attributes_of(span.attributes),
            attributes_of(resource.resource.attributes),
            span.status.code,
            (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
