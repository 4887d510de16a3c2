"""Combines the status, info and statistics of several engines behind one ``EngineClient``. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from chorale.client.base import EngineInfo, EngineStatus
from chorale.engine.commands import Outcome
from chorale.engine.types import EngineStats

# Best first. The combined state is the best one: the server serves as long as one engine does.
ORDER = ("ready", "draining", "loading", "dead", "failed")
_MAXIMA = ("last_step_tokens", "sleep_state")  # combined by max, not by sum
_NAMES = ("running_adapters", "waiting_adapters")


def merge_status(statuses: Sequence[EngineStatus]) -> EngineStatus:
    """Returns the status with the best state, or the first such status if there are several."""
    return min(statuses, key=lambda status: ORDER.index(status.state))


def merge_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Returns the limits that a request may use on every engine: the minimum of each size."""
    sizes = ("max_model_len", "max_num_seqs", "num_kv_tokens", "num_blocks", "max_logprobs")
    return msgspec.structs.replace(
        infos[0],
        engine_id=" ".join(info.engine_id for info in infos),
        notes=tuple(dict.fromkeys(note for info in infos for note in info.notes)),
        **{name: min(getattr(info, name) for info in infos) for name in sizes},
    )


def merge_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Returns what is true of every engine."""
    versions = {each.weight_version for each in outcomes}
    return Outcome(
        all(each.is_paused for each in outcomes),
        all(each.is_sleeping for each in outcomes),
        all(each.success for each in outcomes),
        versions.pop() if len(versions) == 1 else "",
    )


def add_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Returns the sums of counters and gauges, the maximum of the values of the last step, and all names."""
    total = EngineStats()
    for name in EngineStats.__struct_fields__:
        values = [getattr(each, name) for each in stats]
        if name in _NAMES:
            setattr(total, name, tuple(sorted({each for names in values for each in names})))
        elif isinstance(getattr(total, name), tuple):
            setattr(total, name, add_columns(values))
        else:
            setattr(total, name, max(values) if name in _MAXIMA else sum(values))
    return total


def add_columns(rows: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Returns the sums of rows of different lengths, by column."""
    return tuple(map(sum, itertools.zip_longest(*rows, fillvalue=0)))


def without_gauges(stats: EngineStats) -> EngineStats:
    """Returns the statistics of a stopped engine: its counters stay, its gauges are 0 or empty."""
    return msgspec.structs.replace(
        stats,
        num_running=0,
        num_waiting=0,
        num_deferred=0,
        kv_blocks_used=0,
        kv_blocks_total=0,
        host_pages_used=0,
        host_pages_total=0,
        prompt_tokens_left=0,
        running_adapters=(),
        waiting_adapters=(),
    )
