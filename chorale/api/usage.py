"""The usage and metrics objects of Chat Completions and Completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chorale.turns.events import TurnEnded, Usage


def usage_object(usage: Usage) -> dict[str, Any]:
    """Returns the usage under OpenAI's names, always with details."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def closing_fields(ends: Sequence[Sequence[TurnEnded]], *, metrics: bool) -> dict[str, Any]:
    """Returns the total ``usage``, and vLLM's ``metrics`` if requested and there is a single choice."""
    usage = of_prompts(of_choices([end.usage for end in row]) for row in ends)
    fields: dict[str, Any] = {"usage": usage_object(usage)}
    if metrics and len(ends) == len(ends[0]) == 1:
        fields["metrics"] = metrics_object(ends[0][0])
    return fields


def metrics_object(ended: TurnEnded) -> dict[str, float | None] | None:
    """Returns times and rates as vLLM defines them, or None if the turn has no timings."""
    times, count = ended.timings, ended.usage.output_tokens
    if times is None:
        return None
    decode = 1000 * (times.last_token - times.first_token)
    elapsed = times.last_token - times.first_scheduled
    return {
        "time_to_first_token_ms": 1000 * (times.first_token - times.first_scheduled),
        "generation_time_ms": decode,
        "queue_time_ms": 1000 * (times.first_scheduled - times.arrival),
        "mean_itl_ms": decode / (count - 1) if count > 1 else None,
        "tokens_per_second": count / elapsed if elapsed > 0 else None,
        "speculative_decoding": None,
    }


def of_choices(usages: Sequence[Usage]) -> Usage:
    """Returns the usage of several choices. Their shared prompt counts once, with its fewest cached tokens.

    Prompts of later rounds, after tool calls, are separate and count for each choice.
    """
    later = sum(usage.later_input_tokens for usage in usages)
    repeated = sum(usage.later_cached_tokens for usage in usages)
    return Usage(
        input_tokens=later + max((u.input_tokens - u.later_input_tokens for u in usages), default=0),
        cached_tokens=repeated + min((u.cached_tokens - u.later_cached_tokens for u in usages), default=0),
        output_tokens=sum(usage.output_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )


def of_prompts(usages: Iterable[Usage]) -> Usage:
    """Returns the summed usage of several prompts in one request."""
    total = Usage()
    for usage in usages:
        total.add(usage)
    return total
