"""The ORCA load report: ``endpoint-load-metrics`` of an answer, if the request asks for it."""

from __future__ import annotations

import json
import re

import pytest

from chorale.engine.types import EngineStats
from tests.support.engine.scripted_client import ScriptedClient
from tests.support.scripted import scripted
from tests.support.server import Server, served

CHAT, BODY = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}
NAMES = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}


class Busy(ScriptedClient):
    @property
    def stats(self) -> EngineStats:
        return EngineStats(kv_blocks_used=10, kv_blocks_total=40, num_waiting=3)


def busy() -> Busy:
    return Busy(scripted().source)


async def report(server: Server, wanted: str, path: str = CHAT, **body: object) -> str | None:
    headers = {"endpoint-load-metrics-format": wanted} if wanted else {}
    answer = await server.http.post(path, json={**BODY, **body}, headers=headers)
    return answer.headers.get("endpoint-load-metrics")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_reports_the_load_in_the_requested_format(stream: bool) -> None:
    async with served(busy()) as server:
        text = await report(server, "TEXT", stream=stream)
        assert dict(re.findall(r"named_metrics\.(\w+)=([\d.]+)", text)) == {
            name: str(value) for name, value in NAMES.items()
        }
        assert text.startswith("TEXT ")
        found = await report(server, "json", stream=stream)
        kind, _, data = found.partition(" ")
        assert (kind, json.loads(data)) == ("JSON", {"named_metrics": NAMES})


async def test_there_is_no_report_unless_it_is_asked_for_or_in_an_error() -> None:
    async with served(busy()) as server:
        assert await report(server, "") is None
        assert await report(server, "BIN") is None
        assert await report(server, "TEXT", temperature=9) is None
        headers = {"endpoint-load-metrics-format": "TEXT"}
        open_path = await server.http.get("/health", headers=headers)
        assert "endpoint-load-metrics" not in open_path.headers
