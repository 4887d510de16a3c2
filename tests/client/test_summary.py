"""Statistics summed over several engines."""

from __future__ import annotations

from chorale.client.summary import add_stats, without_gauges
from chorale.engine.types import EngineStats


def test_accepted_tokens_are_added_by_position() -> None:
    first = EngineStats(num_drafts=3, num_accepted_tokens=5, accepted_per_position=(3, 2))
    second = EngineStats(num_drafts=4, num_accepted_tokens=7, accepted_per_position=(4, 2, 1))
    both = add_stats([first, second, EngineStats()])
    assert (both.num_drafts, both.num_accepted_tokens) == (7, 12)
    assert both.accepted_per_position == (7, 4, 1)


def test_the_adapters_of_all_engines_are_named_once() -> None:
    first = EngineStats(running_adapters=("a", "b"), waiting_adapters=("c",))
    both = add_stats([first, EngineStats(running_adapters=("a",))])
    assert (both.running_adapters, both.waiting_adapters) == (("a", "b"), ("c",))


def test_an_engine_that_has_stopped_keeps_its_counters_and_names_no_adapter() -> None:
    running = EngineStats(num_steps=9, num_running=2, running_adapters=("a",), waiting_adapters=("b",))
    assert without_gauges(running) == EngineStats(num_steps=9)
