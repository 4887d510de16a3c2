"""PDF files in messages: each endpoint that takes messages reads them, and says which one it cannot read."""

from __future__ import annotations

import base64
import importlib.util
from typing import Any

import pytest

from chorale.errors import install_hint
from chorale.tools.pdf.reader import MAX_FILES
from tests.support.scripted import FINAL, playing
from tests.support.server import served
from tests.support.tools.pdf import pdf

DATA = base64.b64encode(pdf("Hello from a page")).decode()
FILE = {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{DATA}"}
PART = {"type": "input_file", **FILE}
BAD = {"file_data": "JVBERi0xLjQ="}
CHAT_PART = {"type": "file", "file": {"file_data": DATA}}
reads = pytest.mark.skipif(importlib.util.find_spec("pypdf") is None, reason="pypdf is not installed")


def message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@reads
async def test_responses_and_chat_completions_read_a_pdf_file() -> None:
    async with served(playing(FINAL + "ok<|return|>", FINAL + "ok<|return|>")) as server:
        await server.respond(input=message({"type": "input_text", "text": "Read:"}, PART))
        assert "Read:a.pdf\n\nHello from a page<|end|>" in server.prompt()
        await server.respond(path="/v1/chat/completions", messages=message(CHAT_PART))
        assert "<|message|>Hello from a page<|end|>" in server.prompt()


@reads
async def test_a_conversation_stores_the_text() -> None:
    async with served(playing(FINAL + "ok<|return|>")) as server:
        made = await server.respond(path="/v1/conversations", items=message(PART))
        items = (await server.http.get(f"/v1/conversations/{made['id']}/items")).json()["data"]
        assert items[0]["content"] == [{"type": "input_text", "text": "a.pdf\n\nHello from a page"}]


@reads
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("responses", {"input": message({**PART, **BAD})}, "input[0].content[0].file_data"),
        (
            "responses",
            {"input": message({**PART, "file_data": "data:application/pdf;base64,no base64!"})},
            "input[0].content[0].file_data",
        ),
        (
            "chat/completions",
            {"messages": message({"type": "file", "file": BAD})},
            "messages[0].content[0].file.file_data",
        ),
        (
            "responses",
            {"input": message(*[PART] * (MAX_FILES + 1))},
            f"input[0].content[{MAX_FILES}].file_data",
        ),
    ],
    ids=["damaged", "no base64", "damaged in chat", "too many"],
)
async def test_a_bad_file_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async with served(playing(FINAL + "ok<|return|>")) as server:
        status, answer = await server.post(f"/v1/{path}", **body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param


async def test_without_pypdf_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pypdf" else find(name))
    async with served(playing(FINAL + "ok<|return|>")) as server:
        status, answer = await server.post(input=message(PART))
    assert (status, answer["error"]["code"]) == (400, "invalid_file")
    assert install_hint("pdf") in answer["error"]["message"]
