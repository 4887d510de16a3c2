"""A client of a server with OpenAI's API: its address and key, its models, its errors, and retries.

``Client`` is for threads, ``AsyncClient`` for coroutines. Neither waits longer than it is told to.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from chorale.errors import ChoraleError, ConfigError

DEFAULT_URL = "http://localhost:8000/v1"
# Statuses that are not the request's fault: the queue is full, the engine is loading or was restarted.
BUSY = frozenset({429, 502, 503, 504})
LONGEST_RETRY_AFTER = 600.0
_JSON = {"content-type": "application/json"}


class NoAnswerError(ChoraleError, code="no_answer"):
    """A request got no answer: the connection failed, or the server ended it without one."""


@dataclass(frozen=True, slots=True)
class Retries:
    """When a request without an answer, or with a status in ``BUSY``, is sent again. Times in seconds.

    An engine that is restarted loads its weights again, so ``patience`` is minutes. ``attempts``: maximum
    number of attempts, for callers that repeat requests themselves.
    """

    attempts: int | None = None
    patience: float = 900.0
    first_delay: float = 0.25  # doubled each time
    longest_delay: float = 15.0

    def delay(self, attempt: int, asked: float | None) -> float:
        """Returns the time before the next attempt; ``asked``: the server's Retry-After."""
        doubled = min(self.first_delay * 2.0 ** min(attempt, 16), self.longest_delay)
        return max(asked or 0.0, doubled * random.uniform(0.5, 1.0))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of an API, which ends in ``/v1``. ``socket``: the server's unix socket, else TCP.

    A private server behind a socket may speak TLS with a certificate for its public name, which is then not
    verified.
    """

    base_url: str = DEFAULT_URL
    api_key: str | None = field(default=None, repr=False)
    socket: Path | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def where(self) -> str:
        return self.base_url if self.socket is None else "a private server"

    def url(self, path: str) -> str:
        """Returns the URL of a path below ``/v1``, or of the server if it begins with "/" (``/health``)."""
        base = self.base_url.rstrip("/")
        return base.removesuffix("/v1") + path if path.startswith("/") else f"{base}/{path}"

    def options(self, seconds: float | None, connections: int) -> dict[str, Any]:
        """Returns arguments of an ``httpx2`` client. ``seconds``: timeout of each read."""
        headers = [(name.encode(), value.encode()) for name, value in self.headers]
        if self.api_key:
            # Stripped, as a key from a file may end with a line end; as bytes, as it may not be ASCII.
            headers.append((b"authorization", f"Bearer {self.api_key.strip()}".encode()))
        return {
            "headers": headers,
            "timeout": httpx2.Timeout(10.0, read=seconds, write=60.0, pool=None),
            "limits": httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
        }


def api_url(url: str, option: str = "--url") -> str:
    """Returns the base of an API's paths: ``/v1`` is added to an address without a path.

    Raises ``ConfigError`` for a URL that no request can be sent to.
    """
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"{option} {url}: {error}; give a URL such as {DEFAULT_URL}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{option} {url}: not an http:// or https:// URL; give one such as {DEFAULT_URL}")
    return url.rstrip("/") + ("/v1" if parsed.path.strip("/") == "" else "")


def error_text(response: httpx2.Response) -> str:
    """Returns the status and the server's message, in OpenAI's form or as the beginning of the body."""
    try:
        found = response.json()["error"]
        text = str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        text = " ".join(response.text.split())
    return f"HTTP {response.status_code}: {text[:500]}" if text else f"HTTP {response.status_code}"


def retry_after(text: str | None) -> float | None:
    """Returns the seconds that a ``Retry-After`` header asks for, within reason."""
    try:
        return min(max(float(text or ""), 0.0), LONGEST_RETRY_AFTER)
    except ValueError:
        return None


def _models(endpoint: Endpoint, response: httpx2.Response) -> list[dict[str, Any]]:
    if response.status_code != 200:
        hint = {
            401: "; set the API key (CHORALE_API_KEY or OPENAI_API_KEY)",
            404: "; does the URL end in /v1?",
        }.get(response.status_code, "")
        raise ChoraleError(f"{endpoint.where} lists no models: {error_text(response)}{hint}")
    try:
        found = [dict(entry) for entry in response.json()["data"]]
        return [entry | {"id": str(entry["id"])} for entry in found]
    except (ValueError, KeyError, TypeError):
        raise ChoraleError(f"{endpoint.where} is not an OpenAI-compatible server") from None


def _first(endpoint: Endpoint, models: list[dict[str, Any]]) -> str:
    if not models:
        raise ConfigError(f"{endpoint.where} lists no models")
    return str(models[0]["id"])


def _unreachable(endpoint: Endpoint, error: Exception) -> ConfigError:
    return ConfigError(f"no server at {endpoint.where} ({_words(error)}); start one with: chorale serve")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Client:
    """Sends requests from one thread at a time. A context manager. ``http`` has the connections."""

    def __init__(self, endpoint: Endpoint, *, transport: httpx2.BaseTransport | None = None) -> None:
        if transport is None and endpoint.socket is not None:
            transport = httpx2.HTTPTransport(uds=str(endpoint.socket), verify=False)
        self.endpoint = endpoint
        self.http = httpx2.Client(transport=transport, **endpoint.options(600.0, 8))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def models(self) -> list[dict[str, Any]]:
        """Returns the server's models, each with its ``id``.

        Raises ``ConfigError`` if there is no server, ``ChoraleError`` if it refuses or is another server.
        """
        try:
            return _models(self.endpoint, self.http.get(self.endpoint.url("models"), timeout=30.0))
        except httpx2.HTTPError as error:
            raise _unreachable(self.endpoint, error) from None

    def first_model(self) -> str:
        """Returns the name of the server's first model. Raises as ``models``."""
        return _first(self.endpoint, self.models())

    def get(self, path: str, seconds: float = 10.0) -> httpx2.Response:
        """``path``: as in ``Endpoint.url``. Raises ``httpx2.HTTPError``."""
        return self.http.get(self.endpoint.url(path), timeout=seconds)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Sends a POST with ``stream: true`` and yields each event.

        Raises ``ChoraleError`` with the server's message, or with the connection's error.
        """
        try:
            with self.http.stream("POST", self.endpoint.url(path), json=body | {"stream": True}) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChoraleError(error_text(response))
                for line in response.iter_lines():
                    if not line.startswith("data:") or line == "data: [DONE]":
                        continue
                    event = json.loads(line[5:])
                    if event.get("error"):
                        raise ChoraleError(str(event["error"].get("message", event["error"])))
                    yield event
        except httpx2.HTTPError as error:
            raise NoAnswerError(f"no answer from {self.endpoint.where} ({_words(error)})") from error


class AsyncClient:
    """Sends requests in one event loop, up to ``connections`` at once. An asynchronous context manager.

    ``num_retries`` counts requests that were sent again.
    """

    def __init__(
        self, endpoint: Endpoint, *, seconds: float | None = 600.0, connections: int = 64,
        retries: Retries = Retries(attempts=1), transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:  # fmt: skip
        if transport is None and endpoint.socket is not None:
            transport = httpx2.AsyncHTTPTransport(uds=str(endpoint.socket), verify=False)
        self.endpoint, self.num_retries = endpoint, 0
        self.http = httpx2.AsyncClient(transport=transport, **endpoint.options(seconds, connections))
        self._retries = retries

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """As ``Client.models``."""
        try:
            return _models(self.endpoint, await self.http.get(self.endpoint.url("models"), timeout=30.0))
        except httpx2.HTTPError as error:
            raise _unreachable(self.endpoint, error) from None

    async def first_model(self) -> str:
        """As ``Client.first_model``."""
        return _first(self.endpoint, await self.models())

    async def get(self, path: str, seconds: float = 10.0) -> httpx2.Response:
        """``path``: as in ``Endpoint.url``. Raises ``httpx2.HTTPError``."""
        return await self.http.get(self.endpoint.url(path), timeout=seconds)

    async def post(
        self, path: str, body: dict[str, Any] | bytes, *, again: Collection[int] = BUSY
    ) -> httpx2.Response:
        """Returns the answer, whatever its status. ``body``: an object, or its JSON.

        Repeats the request as set by ``retries`` while there is no answer, or one with a status in
        ``again``. Raises ``NoAnswerError``.
        """
        url = self.endpoint.url(path)
        if isinstance(body, dict):
            body = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        deadline, attempt = time.monotonic() + self._retries.patience, 0
        while True:
            fault, response, asked = None, None, None
            try:
                response = await self.http.post(url, content=body, headers=_JSON)
                if response.status_code not in again:
                    return response
                asked = retry_after(response.headers.get("retry-after"))
            except httpx2.HTTPError as error:
                fault = NoAnswerError(f"no answer from {self.endpoint.where} ({_words(error)})")
            attempt += 1
            delay = self._retries.delay(attempt - 1, asked)
            if attempt == self._retries.attempts or time.monotonic() + delay > deadline:
                if response is None:
                    raise fault or AssertionError
                return response
            self.num_retries += 1
            await asyncio.sleep(delay)
