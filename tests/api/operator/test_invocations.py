"""SageMaker's path: the body says which endpoint answers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from chorale.api.app import create_app
from tests.support.app import make_state
from tests.support.scripted import FINAL, playing


def invoke(body: dict[str, Any]) -> httpx2.Response:
    async def main() -> httpx2.Response:
        async with make_state(playing(FINAL + "Hi.<|return|>")) as state:
            transport = httpx2.ASGITransport(app=create_app(state))
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await http.post("/invocations", json=body)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "chat.completion"),
        ({"prompt": "hi"}, "text_completion"),
        ({"input": "hi"}, "response"),
    ],
)
def test_the_body_chooses(body: dict[str, Any], kind: str) -> None:
    assert invoke(body).json()["object"] == kind
    streamed = invoke({**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("body", [{}, {"model": "demo"}, {"prompt": "x", "input": "y"}])
def test_a_body_for_no_endpoint_or_for_two(body: dict[str, Any]) -> None:
    response = invoke(body)
    assert response.status_code == 400
    assert "messages (chat)" in response.json()["error"]["message"]
