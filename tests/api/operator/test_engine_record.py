"""Counters of an engine over its restarts."""

from __future__ import annotations

import pytest

from chorale.api.telemetry.engine_record import EngineRecord
from chorale.client.base import EngineInfo, EngineStatus
from chorale.engine.types import EngineStats


class View:
    def __init__(self) -> None:
        self.become("a", 0)

    def become(self, engine_id: str, steps: int) -> None:
        self.info = EngineInfo(model="m", engine_id=engine_id, max_model_len=10, max_num_seqs=1)
        self.stats = EngineStats(num_steps=steps, generation_tokens=10 * steps)
        self.status = EngineStatus("ready", restarts=int(engine_id == "b"))


@pytest.mark.parametrize("scraped", [False, True])
@pytest.mark.parametrize(("steps", "counted"), [(3, 8), (5, 10), (40, 45)])
def test_counters_of_a_restarted_engine_are_added_whether_lower_or_higher(
    steps: int, counted: int, scraped: bool
) -> None:
    view, record = View(), EngineRecord({"model_name": "m", "engine": "0"})
    record.watch(view)
    record.current_stats()
    view.become("a", 5)
    record.current_stats()
    if scraped:  # while the new engine starts
        view.stats = EngineStats()
        record.current_stats()
        view.become("b", 2)
        record.observe(view.stats)  # by a request, before the new id is seen
    view.become("b", steps)
    for _ in range(2):
        assert record.totals(record.current_stats()).num_steps == counted
        assert record.totals(record.current_stats()).generation_tokens == 10 * counted
    assert record.num_restarts == 1
