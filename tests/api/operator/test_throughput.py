"""The log lines on throughput and drafts: their numbers per interval, and when they are logged."""

from __future__ import annotations

import asyncio
import logging

import pytest

from chorale.api.telemetry.throughput import Throughput
from chorale.engine.types import EngineStats, GenerateRequest
from tests.support.scripted import scripted
from tests.support.server import served


def test_the_throughput_line_covers_one_interval() -> None:
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
    assert throughput.lines(stats, 110.0) == [
        "Engine 000: Avg prompt throughput: 80.0 tokens/s, Avg generation throughput: 45.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 20.0%"
    ]


def test_the_draft_line_covers_one_interval() -> None:
    counts = {"num_drafts": 5, "num_draft_tokens": 15, "num_accepted_tokens": 2, "num_steps": 9}
    log = Throughput(EngineStats(**counts, accepted_per_position=(2,)), 100.0, engine=1)
    counts = {"num_drafts": 105, "num_draft_tokens": 315, "num_accepted_tokens": 170, "num_steps": 200}
    stats = EngineStats(**counts, accepted_per_position=(82, 58, 30))
    assert log.lines(stats, 110.0, 4) == [
        "Engine 001: SpecDecoding metrics: Mean acceptance length: 2.68, "
        "Accepted throughput: 16.80 tokens/s, "
        "Drafted throughput: 30.00 tokens/s, Accepted: 168 tokens, Drafted: 300 tokens, "
        "Per-position acceptance rate: 0.800, 0.580, 0.300, 0.000, Avg Draft acceptance rate: 56.0%"
    ]
    assert log.lines(stats, 120.0, 4) == []  # nothing was drafted


def test_lines_are_logged_during_work_and_once_after() -> None:
    throughput = Throughput(EngineStats(), 0.0)
    idle = EngineStats(kv_blocks_total=10)
    assert throughput.lines(idle, 10.0) == []
    busy = EngineStats(num_running=1, kv_blocks_total=10, num_steps=1)  # a long prompt: no token yet
    assert len(throughput.lines(busy, 20.0)) == 1
    done = EngineStats(generation_tokens=50, kv_blocks_total=10, num_preemptions=2, num_steps=60)
    [line] = throughput.lines(done, 30.0)
    assert "generation throughput: 5.0 tokens/s" in line
    assert "Preemptions: 2" in line
    [closing] = throughput.lines(done, 40.0)
    assert "generation throughput: 0.0 tokens/s, Running: 0 reqs" in closing
    assert "Preemptions" not in closing
    assert throughput.lines(done, 50.0) == []


def test_counters_of_a_restarted_engine_start_from_zero() -> None:
    old = {"num_drafts": 50, "num_draft_tokens": 100, "num_accepted_tokens": 70, "num_steps": 900}
    throughput = Throughput(EngineStats(generation_tokens=5000, **old), 0.0)
    new = EngineStats(generation_tokens=20, num_drafts=2, num_draft_tokens=4, num_steps=3)
    line, drafts = throughput.lines(new, 10.0, 2)
    assert "generation throughput: 2.0 tokens/s" in line
    assert "Drafted: 4 tokens" in drafts
    assert "Per-position acceptance rate: 0.000, 0.000" in drafts


@pytest.mark.parametrize("disabled", [False, True])
async def test_a_server_logs_unless_disabled(disabled: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "chorale.stats"):
        client = scripted([1] * 5, hang=True)
        request = GenerateRequest(request_id="r", prompt_token_ids=[1, 2, 3])
        async with served(
            client, log_stats_interval=0.05, disable_log_stats=disabled, listens=True
        ) as server:
            generating = server.state.client.submit(request)
            await asyncio.sleep(0.2)
            await generating.aclose()
    lines = [record.getMessage() for record in caplog.records if record.name == "chorale.stats"]
    assert bool(lines) != disabled
    assert all("Running: 1 reqs" in line for line in lines[:-1])
