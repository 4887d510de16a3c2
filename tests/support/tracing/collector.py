"""An OTLP/HTTP collector for tests, which decodes the posted spans."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


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


class Collector:
    """A context manager. ``delay``: seconds before each answer; ``status``: HTTP status of the answers."""

    def __init__(self, *, status: int = 200, delay: float = 0.0) -> None:
        self.spans: list[Exported] = []
        self.num_posts = 0
        self.headers: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.headers.append({key.lower(): value for key, value in self.headers.items()})
                collector.num_posts += 1
                time.sleep(delay)
                if status == 200 and self.path == "/v1/traces":
                    collector.spans += decode(body)
                self.send_response(status if self.path == "/v1/traces" else 404)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

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
