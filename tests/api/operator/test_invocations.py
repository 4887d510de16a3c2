"""SageMaker's path: the body selects the endpoint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripted import FINAL, playing
from tests.support.server import with_server


def invoke(body: dict[str, Any]) -> Any:
    client = playing(FINAL + "Hi.<|return|>")
    return with_server(client, lambda server: server.http.post("/invocations", json=body))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "chat.completion"),
        ({"prompt": "hi"}, "text_completion"),
        ({"input": "hi"}, "response"),
    ],
)
def test_the_body_selects_the_endpoint(body: dict[str, Any], kind: str) -> None:
    assert invoke(body).json()["object"] == kind
    streamed = invoke({**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("body", [{}, {"model": "demo"}, {"prompt": "x", "input": "y"}])
def test_a_body_for_no_endpoint_or_for_two_is_refused(body: dict[str, Any]) -> None:
    response = invoke(body)
    assert response.status_code == 400
