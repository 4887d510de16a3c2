"""The server under evaluation: JSON requests to it, repeated while the transport or the server's load fails.

A request is repeated only if no answer arrived. The number of attempts and each wait are bounded.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from chorale.errors import ConfigError
from chorale_evals.errors import RefusedError, UnansweredError

_AGAIN = frozenset(
    {408, 409, 425, 429, 500, 502, 503, 504, 529}
)  # statuses after which a request is repeated
_BUSY = (429, 503)
_MISCONFIGURED = frozenset({401, 403, 404, 405})  # no other request would fare better
_LONGEST_WAIT = 60.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server with OpenAI's API. ``socket``: the unix socket that it listens on, None for TCP."""

    base_url: str
    api_key: str | None = None
    socket: str | None = None


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of one request. ``seconds``: until the answer is complete, since answers are not streamed.

    ``busy_attempts``: if the last answer was that the server is busy (429 or 503).
    """

    seconds: float = 3600.0
    attempts: int = 8
    busy_attempts: int = 30
    first_wait: float = 1.0  # doubled after each attempt, or the server's Retry-After


class Server:
    """Sends requests. Made by ``open_server``."""

    def __init__(self, client: httpx2.AsyncClient, patience: Patience) -> None:
        self._client, self._patience = client, patience
        self.num_retries = 0

    async def models(self) -> list[dict[str, Any]]:
        """Returns the server's list of models. Raises ``ConfigError`` if there is no such server."""
        try:
            response = await self._client.get("models", timeout=30.0)
        except httpx2.HTTPError as error:
            raise ConfigError(f"no server at {self._client.base_url} ({_words(error)})") from None
        if response.status_code != 200:
            hint = "; does the URL end in /v1?" if response.status_code == 404 else ""
            raise ConfigError(f"{self._client.base_url}models: {_message(response)}{hint}")
        try:
            entries = response.json()["data"]
            return [dict(entry) for entry in entries]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{self._client.base_url} is not an OpenAI-compatible server") from None

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON object of the answer.

        Raises ``RefusedError`` if the server refuses the request, ``UnansweredError`` after all attempts, and
        ``ConfigError`` if every request would fail (a wrong key, model or path).
        """
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        wait = self._patience.first_wait
        for attempt in itertools.count(1):
            asked, most = None, self._patience.attempts
            try:
                response = await self._client.post(
                    path, content=data, headers={"content-type": "application/json"}
                )
                if response.status_code == 200:
                    return _object(response)
                _raise_if_final(path, response)
                problem, asked = _message(response), _retry_after(response)
                most = self._patience.busy_attempts if response.status_code in _BUSY else most
            except httpx2.HTTPError as error:
                problem = _words(error)
            except ValueError as error:
                problem = f"the body is not JSON ({error})"
            if attempt >= most:
                raise UnansweredError(f"no answer in {attempt} attempts: {problem}")
            self.num_retries += 1
            pause = wait if asked is None else max(asked, 0.05)
            await asyncio.sleep(min(pause, _LONGEST_WAIT) * random.uniform(0.75, 1.25))
            wait = min(2 * wait, _LONGEST_WAIT)
        raise AssertionError("unreachable")


@asynccontextmanager
async def open_server(
    endpoint: Endpoint, *, patience: Patience | None = None, connections: int = 64
) -> AsyncIterator[Server]:
    """Opens a pool of ``connections``. The URL has been checked by the caller."""
    patience = patience or Patience()
    headers = {}
    if endpoint.api_key:
        headers = {b"authorization": f"Bearer {endpoint.api_key.strip()}".encode()}
    limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
    transport = httpx2.AsyncHTTPTransport(uds=endpoint.socket, limits=limits) if endpoint.socket else None
    timeout = httpx2.Timeout(10.0, read=patience.seconds, write=60.0, pool=None)
    async with httpx2.AsyncClient(
        base_url=endpoint.base_url.rstrip("/") + "/",
        headers=headers,
        transport=transport,
        limits=limits,
        timeout=timeout,
    ) as client:
        yield Server(client, patience)


def _object(response: httpx2.Response) -> dict[str, Any]:
    found = response.json()
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _raise_if_final(path: str, response: httpx2.Response) -> None:
    status = response.status_code
    if status in _MISCONFIGURED:
        raise ConfigError(f"the server refuses every request to {path}: {_message(response)}")
    if status not in _AGAIN:
        raise RefusedError(_message(response))


def _retry_after(response: httpx2.Response) -> float | None:
    try:
        return float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return None


def _message(response: httpx2.Response) -> str:
    """Returns the status and the server's message, in OpenAI's form or as the beginning of the body."""
    try:
        found = response.json()["error"]
        text = str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        text = " ".join(response.text.split())
    return f"HTTP {response.status_code}: {text[:500]}" if text else f"HTTP {response.status_code}"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
