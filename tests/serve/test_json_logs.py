"""--log-format json: every process logs one JSON object per line, whatever the message contains."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chorale.ids import new_id
from chorale.serve.logs import EXPORTER, ExporterFilter, JsonFormatter
from chorale.tracing.context import CURRENT, RequestContext
from chorale.tracing.otel import is_installed
from tests.serve.test_supervisor import Supervised, serve
from tests.support.tracing.collector import Collector
from tests.support.tracing.spans import KeptTracer

HOSTILE = 'x\n{"level":"error"}\r\x1b[2J\x85\u2028\x00 \N{GRINNING FACE} é "quoted" \udc80'


def record(message: str, *args: object, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("chorale.api", logging.WARNING, "f.py", 1, message, args, None)
    made.__dict__.update(extra)
    return made


def parsed(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter("engine-0").format(made)
    assert line.isascii()
    assert line.isprintable()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_record_becomes_a_json_object() -> None:
    found = parsed(record("a %s of %d", HOSTILE, 3, created=1795430253.25))
    assert found == {
        "timestamp": "2026-11-23T10:37:33.250Z",
        "level": "warning",
        "logger": "chorale.api",
        "message": f"a {HOSTILE} of 3",
        "process": "engine-0",
        "pid": os.getpid(),
    }


def test_the_traceback_of_an_exception_is_a_member() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        found = parsed(record("it failed", exc_info=(ValueError, error, error.__traceback__)))
    assert found["message"] == "it failed"
    assert found["exception"].startswith("Traceback (most recent call last):\n")
    assert HOSTILE in found["exception"]


def test_records_have_the_ids_of_the_request_and_its_trace() -> None:
    span = KeptTracer().start("x", {}, {}, "server")
    for context, ids in (
        (RequestContext("req_1"), {"request_id": "req_1"}),
        (RequestContext("req_2", span), {
            "request_id": "req_2", "trace_id": span.trace_id, "span_id": span.span_id}),
    ):  # fmt: skip
        token = CURRENT.set(context)
        found = parsed(record("x", fields={"status": 200}))
        CURRENT.reset(token)
        assert found.items() >= {**ids, "status": 200}.items()


def test_each_error_of_the_trace_exporter_is_logged_once_a_minute() -> None:
    once = ExporterFilter()
    faults = [record("queue full", name=f"{EXPORTER}sdk") for _ in range(3)]
    assert [once.filter(each) for each in faults] == [True, False, False]
    assert once.filter(record("another", name=f"{EXPORTER}sdk"))
    assert [once.filter(record("queue full")) for _ in range(2)] == [True, True]


WRITER = """
import logging, sys
from chorale.serve.logs import LogOptions, configure_logging, share_lock
configure_logging(LogOptions("info", "json"), "w" + sys.argv[2])
share_lock(sys.argv[1])
for number in range(40):
    logging.getLogger("x").info("%d %s", number, "y" * 200_000)
if sys.argv[2] == "0":
    import warnings
    warnings.warn("beware")
    raise ValueError("uncaught")
"""


def test_lines_of_processes_do_not_mix(tmp_path: Path) -> None:
    """The lines are longer than a pipe's buffer: without the lock, other lines are written in between."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "lock")]
    reader, writer = os.pipe()
    processes = [subprocess.Popen([*command, str(index)], stderr=writer) for index in range(3)]
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        lines = [json.loads(line) for line in pipe]
    codes = [process.wait(30) for process in processes]
    assert codes == [1, 0, 0]
    ours = [line for line in lines if line["logger"] == "x"]
    assert len(ours) == 120
    for name in ("w0", "w1", "w2"):
        numbers = [int(line["message"].split()[0]) for line in ours if line["process"] == name]
        assert numbers == list(range(40))
    others = [line for line in lines if line["logger"] != "x"]
    assert [line["logger"] for line in others] == ["py.warnings", "chorale.uncaught"]
    assert "ValueError: uncaught" in others[1]["exception"]


def test_every_log_line_of_a_server_is_a_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a supervisor, two API processes and a fake engine, with tracing if the extra is installed."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    traced = is_installed()
    options: dict[str, Any] = {
        "log_format": "json", "log_level": "info", "api_server_count": 2, "served_model_names": ["demo"],
    }  # fmt: skip
    with Collector() as collector:
        if traced:
            options["otlp_traces_endpoint"] = collector.url
        with serve(server=options) as server:
            server.wait_until("it is ready", lambda: "ready" in server.states)
            ids = [send(server) for _ in range(6)]
            server.process.terminate()
            assert server.ended() == 0
            lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    logged = [line for line in lines if line["logger"] == "chorale.access"]
    access = {line["request_id"]: line for line in logged}
    # Two processes write the lines, so a later request may be logged first.
    assert sorted(ids) == sorted(line["request_id"] for line in logged if line["request_id"] in ids)
    for line in (access[name] for name in ids):
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
        assert line["duration_ms"] > 0
        assert line["process"] in ("api-0", "api-1")
    spans = {span.attributes["gen_ai.request.id"]: span for span in collector.servers()}
    assert [name for name in ids if name in spans] == (ids if traced else [])
    for name, span in spans.items():
        assert (access[name]["trace_id"], access[name]["span_id"]) == (span.trace_id, span.span_id)
        assert span.resource["chorale.process"] == access[name]["process"]


def send(server: Supervised) -> str:
    """Send completions until an API process answers one. Returns its request id."""
    ids: list[str] = []

    def is_answered() -> bool:
        ids.append(new_id("req"))
        body = {"model": "demo", "prompt": "hi", "max_tokens": 2}
        return server.ask("/v1/completions", body, **{"x-request-id": ids[-1]})[0] == 200

    server.wait_until("an answer", is_answered)
    return ids[-1]
