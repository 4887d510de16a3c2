"""The files of the chat page, as the server sends them."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import chorale.api.operator.page
from chorale.api.operator.page import load, version
from chorale.config.engine import hash_key
from tests.support.raw_http import call
from tests.support.scripted import FINAL, playing
from tests.support.server import Server, in_thread, with_server

STATIC = Path(chorale.api.operator.page.__file__).parent / "static"
LIMIT = 1_500_000  # bytes of the page in the wheel


def got(path: str, **headers: str) -> Any:
    """Returns the answer of a server that requires an API key."""
    return with_server(
        playing(), lambda server: server.http.get(path, headers=headers), keys=(hash_key("sesame"),)
    )


def test_the_page_has_a_strict_policy_and_no_code_of_its_own() -> None:
    answer = got("/", authorization="none")
    assert answer.status_code == 200
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "font-src": "'self'",
        "img-src": "data: blob:", "connect-src": "'self'", "base-uri": "'none'", "form-action": "'none'",
        "frame-ancestors": "'none'",
    }  # fmt: skip
    assert not re.search(r"<style|<script(?![^>]* src=)| style=| on[a-z]+=", answer.text)
    links = re.findall(r'(?:src|href)="((?!data:)[^"]+)"', answer.text)
    assert all(link.startswith(f"static/{version()}/") or link == "docs" for link in links)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_file_is_kept_for_good_at_the_address_with_its_hash() -> None:
    address = f"/static/{version()}/main.js"
    answer = got(address, **{"accept-encoding": "gzip"})
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["content-encoding"] == "gzip"
    plain = got(address, **{"accept-encoding": "identity"})
    assert plain.content == gzip.decompress(load("main.js")[1] or b"") == (STATIC / "main.js").read_bytes()
    assert got("/static/of-another-version/main.js").headers["cache-control"] == "no-cache"


def test_only_the_page_s_files_are_served() -> None:
    with in_thread(playing()) as server:
        for name in ("../__init__.py", "%2e%2e/__init__.py", "vendor", "vendor/LICENSES.txt", "no.js", ""):
            found = with_server(playing(), lambda _, name=name: call(server.port, "GET", f"/static/x/{name}"))
            assert found.status == 404, name


def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) < LIMIT


def test_answers_cannot_be_run_as_scripts() -> None:
    async def main(server: Server) -> list[Any]:
        made = await server.http.post("/v1/responses", json={"input": "alert(1)", "model": "demo"})
        stored = await server.http.get(f"/v1/responses/{made.json()['id']}/input_items")
        return [made, stored, await server.http.get("/v1/nothing/alert(1)")]

    for answer in with_server(playing(FINAL + "alert(1)<|return|>"), main):
        assert answer.headers["x-content-type-options"] == "nosniff"
