"""Each log record is one line, whatever its message contains."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from chorale.serve.logs import OneLineFormatter


def render(message: str, *args: object, **extra: object) -> str:
    record = logging.LogRecord("chorale.api", logging.WARNING, "f.py", 1, message, args, None)
    record.__dict__.update(extra)
    return OneLineFormatter("%(levelname)s %(name)s: %(message)s").format(record)


def test_text_from_a_client_cannot_forge_a_record() -> None:
    hostile = "x\nERROR chorale.api: forged\r\x1b[2J\x85\u2028\x00 \N{GRINNING FACE} é"
    line = render("no model %r, or: %s", hostile, hostile)
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert "\N{GRINNING FACE} é" in line
    assert line.startswith("WARNING chorale.api: no model")


def test_a_traceback_keeps_its_lines() -> None:
    try:
        raise ValueError("why")
    except ValueError as error:
        text = render("it failed", exc_info=(ValueError, error, error.__traceback__))
    assert text.splitlines()[0] == "WARNING chorale.api: it failed"
    assert len(text.splitlines()) > 3


@pytest.mark.parametrize(("level", "shown"), [("info", False), ("debug", True)])
def test_libraries_do_not_log_each_request(level: str, shown: bool) -> None:
    code = (
        "import logging; from chorale.serve.logs import LogOptions, configure_logging\n"
        f"configure_logging(LogOptions({level!r}))\n"
        "import httpx2\n"
        "transport = httpx2.MockTransport(lambda request: httpx2.Response(200))\n"
        "httpx2.Client(transport=transport).get('http://x/')\n"
        "logging.getLogger('huggingface_hub.file_download').info('resolved')\n"
        "logging.getLogger('httpx2').warning('seen')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ("HTTP Request" in done.stderr) == shown
    assert ("resolved" in done.stderr) == shown
    assert "httpx2: seen" in done.stderr
