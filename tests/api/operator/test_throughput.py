"""The line of throughput: its numbers, when it comes, and when it does not."""

from __future__ import annotations

import asyncio
import logging

import pytest

from chorale.api.telemetry.throughput import Throughput
from chorale.engine.types import EngineStats, GenerateRequest
from tests.support.scripted import scripted
from tests.support.server import served


def test_numbers_of_one_interval() -> None:
    throughput = Throughput(EngineStats(), 100.0)
    stats = EngineStats(
        num_running=3,
        num_waiting=2,
        kv_blocks_used=25,
        kv_blocks_total=200,
        prompt_tokens=1000,
        cached_prompt_tokens=200,
        generation_tokens=450,
        prefix_cache_queries=1000,
        prefix_cache_hits=200,
        num_steps=9,
    )
    assert throughput.line(stats, 110.0) == (
        "Engine 000: Avg prompt throughput: 80.0 tokens/s, Avg generation throughput: 45.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 20.0%"
    )


def test_lines_come_while_there_is_work_and_once_after() -> None:
    throughput = Throughput(EngineStats(), 0.0)
    idle = EngineStats(kv_blocks_total=10)
    assert throughput.line(idle, 10.0) is None
    busy = EngineStats(num_running=1, kv_blocks_total=10, num_steps=1)  # a prompt of minutes: no token yet
    assert throughput.line(busy, 20.0) is not None
    done = EngineStats(generation_tokens=50, kv_blocks_total=10, num_preemptions=2, num_steps=60)
    line = throughput.line(done, 30.0)
    assert line is not None
    assert "generation throughput: 5.0 tokens/s" in line
    assert "Preemptions: 2" in line
    closing = throughput.line(done, 40.0)
    assert closing is not None
    assert "generation throughput: 0.0 tokens/s, Running: 0 reqs" in closing
    assert "Preemptions" not in closing
    assert throughput.line(done, 50.0) is None


def test_another_engine_process_counts_from_zero() -> None:
    throughput = Throughput(EngineStats(generation_tokens=5000, num_steps=900), 0.0)
    line = throughput.line(EngineStats(generation_tokens=20, num_steps=3), 10.0)
    assert line is not None
    assert "generation throughput: 2.0 tokens/s" in line


@pytest.mark.parametrize("disabled", [False, True])
async def test_a_server_logs_it(disabled: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "chorale.stats"):
        client = scripted([1] * 5, hang=True)
        request = GenerateRequest(request_id="r", prompt_token_ids=[1, 2, 3])
        async with served(client, log_stats_interval=0.1, disable_log_stats=disabled, listens=True) as server:
            generating = server.state.client.submit(request)
            await asyncio.sleep(0.5)
            await generating.aclose()
    lines = [record.getMessage() for record in caplog.records if record.name == "chorale.stats"]
    assert bool(lines) != disabled
    assert all("Running: 1 reqs" in line for line in lines[:-1])
