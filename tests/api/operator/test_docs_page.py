"""/docs: Swagger UI in a real browser, and its files and examples without one."""

from __future__ import annotations

import gzip
import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from chorale.api.http.auth import DOCS_PATHS
from chorale.api.openapi import EXAMPLES, describe
from chorale.api.operations import OPERATIONS
from chorale.api.operator.docs import load
from chorale.config.engine import hash_key
from tests.support.browsers.chromium import PATH, Page
from tests.support.raw_http import call
from tests.support.scripted import FINAL, playing
from tests.support.server import in_thread
from tests.support.server import served_on_port as served


@pytest.mark.skipif(PATH is None, reason="there is no Chromium on this machine")
def test_a_request_is_executed_with_a_key_and_below_a_path(tmp_path: Path) -> None:
    answer = playing(FINAL + "17 + 25 = 42<|return|>")
    with (
        in_thread(answer, root_path="/prefix", keys=[hash_key("secret")]) as server,
        closing(Page(tmp_path)) as page,
    ):
        page.open(f"http://127.0.0.1:{server.port}/prefix/docs")
        page.until("document.querySelector('.opblock')", 30)
        page.click("button.authorize")
        page.until("document.querySelector('.auth-container input')")
        page.value("document.querySelector('.auth-container input').focus()")
        page.call("Input.insertText", text="secret")
        page.click(".auth-btn-wrapper .authorize")
        page.click(".auth-btn-wrapper .btn-done")
        page.click("#operations-Responses-postV1Responses button.opblock-summary-control")
        page.until("document.querySelector('button.execute')")
        # Swagger UI shows the button some milliseconds before it has resolved the operation; a click between
        # the two ends in OperationNotFoundError on the console and nothing else.
        page.until("ui.getState().getIn(['spec', 'resolvedSubtrees', 'paths', '/v1/responses', 'post'])")
        shown = page.value("document.querySelector('textarea.body-param__text').value")
        assert json.loads(shown) == {"model": "demo", "input": "What is 17 + 25?"}
        page.click("button.execute")
        page.until("document.querySelector('.live-responses-table tr.response td.response-col_status')")
        assert page.text(".live-responses-table tr.response td.response-col_status")[0].startswith("200")
        assert "17 + 25 = 42" in page.text(".live-responses-table")[0]
        assert "/prefix/v1/responses" in page.text(".request-url")[0]
        assert page.console == []  # nothing failed, nothing was refused by the policy


async def test_files_are_served_plain_or_compressed_with_a_strict_policy() -> None:
    async with served() as server:
        for path in DOCS_PATHS:
            plain = await call(server.port, "GET", path)
            packed = await call(server.port, "GET", path, None, {"accept-encoding": "br, gzip"})
            assert (plain.status, packed.status) == (200, 200)
            assert "content-encoding" not in plain.headers
            assert packed.headers["content-encoding"] == "gzip"
            assert gzip.decompress(packed.body) == plain.body
            policy = plain.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self'" in policy
            assert "unsafe-eval" not in policy
            assert "http" not in policy


def test_the_page_links_only_to_this_server() -> None:
    text = load("index.html")[0].decode()
    links = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert set(links) == {"data:,", "openapi.json"} | {path[1:] for path in DOCS_PATHS if path != "/docs"}
    assert "<script>" not in text


async def test_disabled_documentation_is_not_found() -> None:
    async with served(disable_docs=True) as server:
        for path in (*DOCS_PATHS, "/openapi.json"):
            assert (await call(server.port, "GET", path)).status == 404


async def test_all_examples_are_answered() -> None:
    """Sends each example body of the page unchanged."""
    async with served(client=playing(FINAL + "Hello<|return|>")) as server:
        described = describe(OPERATIONS, "/", "demo")
        sent = 0
        made = (await call(server.port, "POST", "/v1/conversations", {})).json["id"]
        for operation in OPERATIONS:
            if operation.path not in EXAMPLES or operation.method != "POST":
                continue
            content = described["paths"][operation.path]["post"]["requestBody"]["content"]
            path = operation.path.replace("{conversation_id}", made)
            answer = await call(server.port, "POST", path, content["application/json"]["example"])
            assert answer.status == 200, (operation.path, answer.body)
            sent += 1
        assert sent >= 12


def test_every_path_parameter_is_described() -> None:
    for path, found in describe(OPERATIONS)["paths"].items():
        for operation in found.values():
            named = {parameter["name"] for parameter in operation.get("parameters", [])}
            assert named == set(re.findall(r"\{(\w+)\}", path))
