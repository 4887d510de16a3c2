"""The minimum rate at which a body must arrive."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from chorale.api.http import request_limits
from chorale.api.http.request_limits import LimitedBody
from chorale.config.engine import ServerConfig
from chorale.errors import RequestTimeoutError

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/files"}


def body_of(pieces: int, pause: float, rate: int) -> LimitedBody:
    """Returns a body of 100-byte pieces that arrive every ``pause`` seconds."""
    left = iter(range(pieces - 1, -1, -1))

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": b"x" * 100, "more_body": next(left) > 0}

    return LimitedBody(receive, SCOPE, ServerConfig(min_upload_rate=rate))


async def read(body: LimitedBody, server_pause: float = 0.0) -> None:
    while not body.complete:
        await body()
        await asyncio.sleep(server_pause)


def test_a_body_below_the_minimum_rate_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "RATE_SECONDS", 0.3)
    with pytest.raises(RequestTimeoutError) as refused:
        asyncio.run(read(body_of(1000, 0.05, 10_000)))
    assert refused.value.status == 408


def test_a_fast_start_does_not_excuse_a_slow_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "RATE_SECONDS", 0.3)
    number = itertools.count()

    async def receive() -> dict[str, Any]:
        if (past := next(number)) < 1000:
            return {"type": "http.request", "body": b"x" * 100_000, "more_body": True}
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b"x", "more_body": past < 1200}

    config = ServerConfig(min_upload_rate=1000, body_timeout=600.0, max_body_bytes=2**30)
    with pytest.raises(RequestTimeoutError):
        asyncio.run(read(LimitedBody(receive, SCOPE, config)))


@pytest.mark.parametrize("rate", [0, 1000])
def test_time_spent_by_the_server_does_not_count(monkeypatch: pytest.MonkeyPatch, rate: int) -> None:
    monkeypatch.setattr(request_limits, "RATE_SECONDS", 0.3)
    asyncio.run(read(body_of(5, 0.0, rate), server_pause=0.1))
