"""The page's modules in Chromium, from a server that sends the page's strict content policy."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from mimetypes import guess_type
from pathlib import Path

import pytest

from tests.support.browsers.chromium import PATH, Page
from tests.support.http_server import Asked, HttpServer, Reply

STATIC = Path(str(files("chorale.api.operator.page"))) / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
HOME = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Rendering</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="/vendor/katex.css">
<link rel="stylesheet" href="/render.css"><link rel="stylesheet" href="/charts.css">
<body><main id="box" class="rendered"></main></body></html>"""


class _Files(HttpServer):
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []

    def answer(self, asked: Asked) -> Reply:
        self.requests.append(asked.path)
        if asked.path == "/":
            kind, body = "text/html", HOME
        else:
            kind, body = str(guess_type(asked.path)[0]), (STATIC / asked.path.lstrip("/")).read_bytes()
        return Reply(200, body, {"content-type": kind, "content-security-policy": POLICY})


class Browser(Page):
    """A page with the modules' exports in ``window``, and the paths that it requested."""

    requests: list[str]


@pytest.fixture(scope="package")  # ends when the worker leaves these tests: an idle browser takes CPU time
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PATH is None:
        pytest.skip("there is no Chromium on this machine")
    with _Files() as server:
        page = Browser(tmp_path_factory.mktemp("chromium"))
        page.requests = server.requests
        page.open(f"{server.url}/")
        page.until("document.getElementById('box')")
        for name in ("render", "charts"):
            page.value(f"import('/{name}.js').then(found => Object.assign(window, found) && true)")
        yield page
        page.close()


@pytest.fixture(autouse=True)
def _fresh(browser: Browser) -> Iterator[None]:
    browser.value("document.getElementById('box').replaceChildren()")
    browser.console.clear()
    browser.requests.clear()
    yield
    assert browser.console == []
