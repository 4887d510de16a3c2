"""The client of an OpenAI server: what it sends, when it asks again, and the errors that it makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from chorale.errors import ChoraleError, ConfigError
from chorale.requests.openai_client import AsyncClient, Client, Endpoint, NoAnswerError, Retries, error_text

QUICK = Retries(patience=5.0, first_delay=0.001, longest_delay=0.002)
Answer = Callable[[httpx2.Request], httpx2.Response]


def client(answer: Answer, retries: Retries = QUICK) -> AsyncClient:
    endpoint = Endpoint("http://test/proxy/v1", " schlüssel\n")
    return AsyncClient(endpoint, retries=retries, transport=httpx2.MockTransport(answer))


async def test_a_request_has_the_key_and_any_text() -> None:
    seen: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(200, json={"data": [{"id": "m"}]})

    async with client(answer) as http:
        await http.post("completions", {"prompt": "\ud800ü"})
        await http.post("/tokenize", b"{}")
        assert await http.first_model() == "m"
    assert [str(each.url) for each in seen] == [
        "http://test/proxy/v1/completions", "http://test/proxy/tokenize", "http://test/proxy/v1/models",
    ]  # fmt: skip
    assert b"Bearer schl\xc3\xbcssel" in dict(seen[0].headers.raw).values()
    assert json.loads(seen[0].content.decode("utf-8", "surrogatepass")) == {"prompt": "\ud800ü"}


@pytest.mark.parametrize(
    ("statuses", "again", "expected"),
    [
        ([429, 502, 503, 504, 200], None, 200),
        ([503, 400, 200], None, 400),
        ([500, 200], None, 500),
        ([500, 200], {500}, 200),
        ([0, 0, 200], None, 200),  # 0: the connection breaks
    ],
)
async def test_a_busy_or_broken_server_is_asked_again(statuses: list[int], again: Any, expected: int) -> None:
    left = list(statuses)

    def answer(request: httpx2.Request) -> httpx2.Response:
        status = left.pop(0)
        if status == 0:
            raise httpx2.RemoteProtocolError("cut")
        return httpx2.Response(status, json={}, headers={"retry-after": "0.001"})

    async with client(answer) as http:
        response = await http.post("x", {}, **({"again": again} if again else {}))
    assert response.status_code == expected
    assert http.num_retries == statuses.index(expected)


async def test_attempts_and_patience_end() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    for retries, expected in ((Retries(attempts=3, first_delay=0.001), 2), (Retries(patience=0.0), 0)):
        async with client(answer, retries) as http:
            with pytest.raises(NoAnswerError, match=r"http://test/proxy/v1 .*refused"):
                await http.post("x", {})
        assert http.num_retries == expected


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (httpx2.ConnectError("refused"), ConfigError),
        (httpx2.Response(200, json={"data": []}), ConfigError),
        (httpx2.Response(401, json={"error": {"message": "no key"}}), ChoraleError),
        (httpx2.Response(200, json={"data": [1]}), ChoraleError),
        (httpx2.Response(200, text="<html>"), ChoraleError),
    ],
)
def test_a_server_without_a_model_is_an_error(response: Any, kind: type[ChoraleError]) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        if isinstance(response, Exception):
            raise response
        return response

    transport = httpx2.MockTransport(answer)
    with (
        Client(Endpoint("http://test/v1"), transport=transport) as http,
        pytest.raises(ChoraleError) as caught,
    ):
        http.first_model()
    assert type(caught.value) is kind
    assert "http://test/v1" in caught.value.message


@pytest.mark.parametrize(
    ("body", "text"),
    [('{"error": {"message": "m"}}', "HTTP 418: m"), ('{"error": "m"}', "HTTP 418: m"),
     ("a\n b", "HTTP 418: a b"), ("", "HTTP 418")],
)  # fmt: skip
def test_the_words_of_an_error(body: str, text: str) -> None:
    assert error_text(httpx2.Response(418, text=body)) == text
