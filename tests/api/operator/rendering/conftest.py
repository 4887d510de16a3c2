"""The page's modules in Chromium, from a server that sends the page's strict content policy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path

import pytest

from tests.support.browsers.chromium import PATH, Page

STATIC = Path(str(files("chorale.api.operator.page"))) / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
HOME = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Rendering</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="/vendor/katex.css">
<link rel="stylesheet" href="/render.css"><link rel="stylesheet" href="/charts.css">
<body><main id="box" class="rendered"></main></body></html>"""


class _Files(SimpleHTTPRequestHandler):
    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.path != "/":
            return super().do_GET()
        self.send_response(200)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(HOME)
        return None

    def end_headers(self) -> None:
        self.send_header("content-security-policy", POLICY)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """The tests read ``requests`` instead."""


class Browser(Page):
    """A page with the modules' exports in ``window``, and the paths that it requested."""

    requests: list[str]


@pytest.fixture(scope="package")  # ends when the worker leaves these tests: an idle browser takes CPU time
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PATH is None:
        pytest.skip("there is no Chromium on this machine")
    handler = type("Files", (_Files,), {"requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: handler(*args, directory=str(STATIC)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = Browser(tmp_path_factory.mktemp("chromium"))
    page.requests = handler.requests
    page.open(f"http://127.0.0.1:{server.server_port}/")
    page.until("document.getElementById('box')")
    for name in ("render", "charts"):
        page.value(f"import('/{name}.js').then(found => Object.assign(window, found) && true)")
    yield page
    page.close()
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _fresh(browser: Browser) -> Iterator[None]:
    browser.value("document.getElementById('box').replaceChildren()")
    browser.console.clear()
    browser.requests.clear()
    yield
    assert browser.console == []
