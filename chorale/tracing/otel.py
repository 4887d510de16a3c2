"""Traces by OpenTelemetry (the extra ``otel``), imported only while traces are exported.

The flag names the collector; all else is read by the SDK from its own variables: OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_EXPORTER_OTLP_HEADERS and so on.

A batch is encoded and sent by a thread. Its queue is bounded (OTEL_BSP_MAX_QUEUE_SIZE, 2,048 spans): while
the collector cannot be reached, the oldest spans are dropped, and requests do not notice.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from chorale.errors import ConfigError, install_hint
from chorale.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as ApiSpan

Value = str | bool | int | float | Sequence[str]
SpanKind = Literal["server", "internal"]

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
FLAG = "--otlp-traces-endpoint"
GRPC_PORT = 4317
CLOSE_SECONDS = 3.0
NEEDS = f"OpenTelemetry is not installed: {install_hint('otel')}"


def is_installed() -> bool:
    """Returns whether the SDK and its exporters can be imported. Imports only their parent packages."""
    try:
        found = [importlib.util.find_spec(name) for name in ("opentelemetry.sdk", *_EXPORTERS.values())]
    except ModuleNotFoundError:
        return False
    return all(found)


def check_endpoint(url: str, environment: Mapping[str, str], named: str = FLAG) -> None:
    """Raises ``ConfigError`` if no traces can be sent to ``url``. ``named``: its flag or variable."""
    parts = urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https", "grpc", "grpcs") and bool(parts.hostname)
        parts.port  # noqa: B018  raises for a port that is no number
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"{named} {url}: must be the URL of a collector, such as "
            "http://localhost:4318/v1/traces, or grpc://localhost:4317"
        )
    protocol(url, environment)
    if not is_installed():
        raise ConfigError(f"{named}: {NEEDS}")


def protocol(url: str, environment: Mapping[str, str]) -> str:
    """Returns ``http/protobuf`` or ``grpc``: from the environment, else from the URL.

    Raises ``ConfigError`` for another protocol.
    """
    named = next((environment[name] for name in _PROTOCOLS if environment.get(name)), None)
    if named is not None and named not in _EXPORTERS:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL {named}: must be one of {', '.join(_EXPORTERS)}")
    parts = urlsplit(url)
    guessed = "grpc" if parts.scheme in ("grpc", "grpcs") or parts.port == GRPC_PORT else "http/protobuf"
    return named or guessed


def is_disabled(environment: Mapping[str, str]) -> bool:
    """Returns whether the SDK's own variables turn traces off."""
    off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return off or environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"


def open_tracer(endpoint: str | None, process: str) -> Tracer | None:
    """Returns the tracer of this process, or None if there is no collector.

    ``endpoint``: the flag's; None: from the environment. Raises ``ConfigError``.
    """
    if is_disabled(os.environ):
        return None
    named = FLAG if endpoint else next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if named is None or (named != FLAG and not is_installed()):
        return None
    url = endpoint or os.environ[named]
    check_endpoint(url, os.environ, named)
    return Tracer(_exporter(endpoint, protocol(url, os.environ)), process)


def _exporter(endpoint: str | None, kind: str) -> SpanExporter:
    """Returns the exporter. Without ``endpoint`` it reads the variables itself."""
    exporter: Any = importlib.import_module(_EXPORTERS[kind]).OTLPSpanExporter
    if endpoint is None:
        made = exporter()
    elif kind == "grpc":
        parts = urlsplit(endpoint)
        made = exporter(endpoint=parts.netloc, insecure=parts.scheme not in ("grpcs", "https"))
    else:
        parts = urlsplit(endpoint)
        path = parts.path if parts.path.strip("/") else "/v1/traces"
        made = exporter(endpoint=parts._replace(path=path).geturl())
    return made  # type: ignore[no-any-return, unused-ignore]


class Tracer:
    """Makes the spans of a process and exports them in a thread.

    It is not registered as the process's global provider.
    """

    def __init__(self, exporter: SpanExporter, process: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        facts: dict[str, str | int] = {
            "service.version": __version__, "process.pid": os.getpid(), "chorale.process": process,
        }  # fmt: skip
        named = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in named:
            facts["service.name"] = "chorale"
        self._provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._exporter = exporter
        self._tracer = self._provider.get_tracer("chorale", __version__)
        self.propagator = TraceContextTextMapPropagator()

    def start(
        self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Value | None], kind: SpanKind
    ) -> Span:
        """Begins a span that continues the trace of ``headers``, or a new trace."""
        from opentelemetry.context import Context

        return self.begin(name, self.propagator.extract(headers, Context()), attributes, kind)

    def begin(
        self, name: str, parent: Context, attributes: Mapping[str, Value | None], kind: SpanKind
    ) -> Span:
        from opentelemetry.trace import SpanKind as ApiKind

        known = {key: value for key, value in attributes.items() if value is not None}
        span = self._tracer.start_span(name, context=parent, kind=ApiKind[kind.upper()], attributes=known)
        return Span(self, span)

    def close(self) -> None:
        """Exports what has ended, for a few seconds at most, then stops."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            self._exporter.shutdown()  # stops its retries; a waiting thread ends with the process


class Span:
    """One operation of a trace. It is exported once it has ended."""

    __slots__ = ("_context", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: ApiSpan) -> None:
        self._tracer, self._span = tracer, span
        self._context = span.get_span_context()

    @property
    def trace_id(self) -> str:
        return f"{self._context.trace_id:032x}"

    @property
    def span_id(self) -> str:
        return f"{self._context.span_id:016x}"

    @property
    def is_recording(self) -> bool:
        """Returns whether it will be exported; otherwise it only passes the trace on."""
        return self._span.is_recording()

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        """Sets attributes; None leaves one out."""
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(name, value)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def child(self, name: str, attributes: Mapping[str, Value | None]) -> Span:
        return self._tracer.begin(name, self._inside(), attributes, "internal")

    def headers(self) -> dict[str, str]:
        """Returns ``traceparent`` and ``tracestate`` for a service that continues the trace."""
        carrier: dict[str, str] = {}
        self._tracer.propagator.inject(carrier, self._inside())
        return carrier

    def _inside(self) -> Context:
        """Returns the context of what happens within the span."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._span, Context())

    def fail(self, kind: str) -> None:
        """Marks it as failed. ``kind``: one of few words, such as an error's code."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        """Ends it. Idempotent."""
        if self._span.is_recording():
            self._span.end()
