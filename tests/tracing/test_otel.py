"""Export by OpenTelemetry to a real receiver: what arrives, and what requests notice of a bad one."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest

from chorale.config.options.settings import merge
from chorale.errors import ConfigError
from chorale.serve.precheck import check_start
from chorale.tracing import otel
from tests.support.event_loop import run
from tests.support.scripted import FINAL, playing
from tests.support.server import served
from tests.support.tracing.collector import Collector, Exported, decode

ANSWER = f"{FINAL}The sea is green.<|return|>"
needs_package = pytest.mark.skipif(not otel.is_installed(), reason="needs the extra otel")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def chats(tracer: Any, number: int = 1, **headers: str) -> float:
    """Send chats. Returns the seconds that they took."""

    async def scenario() -> float:
        async with served(playing(ANSWER), tracer=tracer) as server:
            began = time.perf_counter()
            for _ in range(number):
                body = {"messages": [{"role": "user", "content": "hi"}]}
                answer = await server.http.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == 200
            return time.perf_counter() - began

    return float(run(scenario()))


@needs_package
def test_spans_reach_the_collector_when_the_server_ends(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-chorale")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=sea")
    tracer = otel.open_tracer(collector.url, "api-3")
    chats(tracer, traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    assert collector.spans == []  # a thread sends them later
    tracer.close()
    (server,) = collector.servers()
    assert (server.name, server.trace_id, server.parent_id) == ("chat demo", "ab" * 16, "cd" * 8)
    assert server.attributes["gen_ai.usage.output_tokens"] > 0
    assert server.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert server.resource["service.name"] == "my-chorale"
    assert server.resource["chorale.process"] == "api-3"
    assert [child.name for child in collector.children(server)] == ["generate"]
    assert collector.headers[0]["x-team"] == "sea"
    assert len(collector.spans) == 2


@needs_package
def test_a_failed_span_has_the_error_status(collector: Collector) -> None:
    tracer = otel.open_tracer(f"{collector.url}/v1/traces", "api-0")
    span = tracer.start("one", {}, {"kept": 1, "left out": None}, "server")
    child = span.child("two", {})
    assert child.headers()["traceparent"].startswith(f"00-{span.trace_id}-{child.span_id}-0")
    child.fail("tool_error")
    for each in (child, span, span):
        each.end()
    tracer.close()
    two, one = collector.spans
    assert (two.parent_id, two.kind, two.status, two.attributes) == (
        one.span_id, "internal", 2, {"error.type": "tool_error"},
    )  # fmt: skip
    assert (one.status, one.attributes) == (0, {"kept": 1})


@needs_package
@pytest.mark.parametrize(("attributes", "service"), [("a=1", "chorale"), ("service.name=mine", "mine")])
def test_the_environment_may_name_the_service(
    attributes: str, service: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", attributes)
    tracer = otel.open_tracer(collector.url, "api-0")
    tracer.start("one", {}, {}, "server").end()
    tracer.close()
    assert [span.resource["service.name"] for span in collector.spans] == [service]


@needs_package
def test_the_environment_selects_the_sampler(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracer = otel.open_tracer(collector.url, "api-0")
    assert tracer is not None
    chats(tracer)  # no parent: off
    chats(tracer, traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")  # a sampled parent: on
    tracer.close()
    assert [span.trace_id for span in collector.servers()] == ["ab" * 16]


@needs_package
@pytest.mark.parametrize("fault", ["absent", "refuses", "slow"])
def test_a_bad_collector_does_not_affect_requests(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setattr(otel, "CLOSE_SECONDS", 0.3)
    caplog.set_level(logging.CRITICAL, logger="opentelemetry")
    with Collector(status=503 if fault == "refuses" else 200, delay=60.0 if fault == "slow" else 0) as made:
        url = "http://127.0.0.1:9" if fault == "absent" else made.url
        tracer = otel.open_tracer(url, "api-0")
        assert tracer is not None
        assert chats(tracer, 20) < 50
        began = time.perf_counter()
        tracer.close()
        assert time.perf_counter() - began < 50


@needs_package
def test_export_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    import grpc

    received: list[Exported] = []

    def export(request: bytes, _: Any) -> bytes:
        received.extend(decode(request))
        return b""

    handler = grpc.method_handlers_generic_handler(
        "opentelemetry.proto.collector.trace.v1.TraceService",
        {"Export": grpc.unary_unary_rpc_method_handler(export)},
    )
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=(handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        tracer = otel.open_tracer(f"grpc://127.0.0.1:{port}", "api-0")
        tracer.start("one", {}, {}, "server").end()
        tracer.close()
    finally:
        server.stop(None).wait()
    assert [span.name for span in received] == ["one"]


def test_traces_are_off_by_default_and_import_nothing() -> None:
    code = (
        "import sys\n"
        "import chorale.api.app, chorale.serve.http.app, chorale.serve.precheck\n"
        "import chorale.cli.commands.serve.serve\n"
        "from chorale.tracing.otel import open_tracer\n"
        "assert open_tracer(None, 'api-0') is None\n"
        "heavy = ('opentelemetry.sdk', 'opentelemetry.exporter')\n"
        "assert not [name for name in sys.modules if name.startswith(heavy)]\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr


def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name.startswith("opentelemetry") else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_without_the_package_the_flag_is_an_error_and_the_environment_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent(monkeypatch)
    settings = merge(["--otlp-traces-endpoint", "http://localhost:4318"], {})
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint: .*pip install (-e )?'\.\[otel\]'"):
        check_start(settings.engine, settings.server)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    assert otel.open_tracer(None, "api-0") is None
    from chorale.cli.commands.serve.serve import warnings

    (notice,) = warnings(merge([], {}))
    assert notice.startswith("OTEL_EXPORTER_OTLP_ENDPOINT is set, but no traces are sent: ")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    check_start(settings.engine, settings.server)  # they are turned off


@pytest.mark.parametrize("url", ["localhost:4317", "ftp://host/", "http://", "http://host:port"])
def test_an_endpoint_must_be_the_url_of_a_collector(url: str) -> None:
    with pytest.raises(ConfigError, match="must be the URL of a collector"):
        otel.check_endpoint(url, {})


@needs_package
def test_an_endpoint_of_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://host:port")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT http://host:port: must be the URL"):
        otel.open_tracer(None, "api-0")


@pytest.mark.parametrize(
    ("url", "named", "protocol"),
    [
        ("http://host:4318/v1/traces", {}, "http/protobuf"),
        ("grpc://host:4317", {}, "grpc"),
        ("http://host:4317", {}, "grpc"),  # the port of OTLP over gRPC: vLLM's examples have it
        ("http://host:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf"),
        ("http://host:99", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "grpc"),
    ],
)
def test_the_protocol_is_named_or_follows_from_the_url(
    url: str, named: dict[str, str], protocol: str
) -> None:
    assert otel.protocol(url, named) == protocol
    with pytest.raises(ConfigError, match="must be one of http/protobuf, grpc"):
        otel.protocol(url, {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"})
