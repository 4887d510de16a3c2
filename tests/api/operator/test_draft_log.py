"""The line about speculative decoding: vLLM's numbers, of the time since the last line."""

from __future__ import annotations

from chorale.api.telemetry.draft_log import DraftLog
from chorale.engine.types import EngineStats


def test_numbers_of_one_interval() -> None:
    first = EngineStats(
        num_drafts=5, num_draft_tokens=15, num_accepted_tokens=2, accepted_per_position=(2,), num_steps=9
    )
    log = DraftLog(first, 100.0, engine=1)
    stats = EngineStats(
        num_drafts=105,
        num_draft_tokens=315,
        num_accepted_tokens=170,
        accepted_per_position=(82, 58, 30),
        num_steps=200,
    )
    assert log.line(stats, 110.0, 4) == (
        "Engine 001: SpecDecoding metrics: Mean acceptance length: 2.68, "
        "Accepted throughput: 16.80 tokens/s, "
        "Drafted throughput: 30.00 tokens/s, Accepted: 168 tokens, Drafted: 300 tokens, "
        "Per-position acceptance rate: 0.800, 0.580, 0.300, 0.000, Avg Draft acceptance rate: 56.0%"
    )
    assert log.line(stats, 120.0, 4) is None  # nothing was drafted


def test_another_engine_process_counts_from_zero() -> None:
    old = EngineStats(num_drafts=50, num_draft_tokens=100, num_accepted_tokens=70, num_steps=80)
    log = DraftLog(old, 0.0)
    line = log.line(EngineStats(num_drafts=2, num_draft_tokens=4, num_steps=2), 10.0, 2)
    assert line is not None
    assert "Drafted: 4 tokens" in line
    assert "Per-position acceptance rate: 0.000, 0.000" in line
