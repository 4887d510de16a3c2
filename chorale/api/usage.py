"""The usage and metrics objects of Chat Completions and Completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chorale.config.engine import DraftMetrics
from chorale.turns.events import TurnEnded, Usage


@dataclass(frozen=True, slots=True)
class ShownMetrics:
    """What ``metrics`` of an answer contains. ``most_drafts``: of the engine; 0: no speculative decoding."""

    times: bool
    drafts: DraftMetrics
    most_drafts: int

    @property
    def any(self) -> bool:
        return self.times or (self.drafts != "none" and self.most_drafts > 0)


NO_METRICS = ShownMetrics(times=False, drafts="none", most_drafts=0)


def usage_object(usage: Usage) -> dict[str, Any]:
    """Returns the usage under OpenAI's names, always with details."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def closing_fields(ends: Sequence[Sequence[TurnEnded]], *, metrics: ShownMetrics) -> dict[str, Any]:
    """Returns the total ``usage``, and vLLM's ``metrics`` if requested and there is a single choice."""
    usage = of_prompts(of_choices([end.usage for end in row]) for row in ends)
    fields: dict[str, Any] = {"usage": usage_object(usage)}
    if metrics.any and len(ends) == len(ends[0]) == 1:
        fields["metrics"] = metrics_object(ends[0][0], metrics)
    return fields


def metrics_object(ended: TurnEnded, shown: ShownMetrics) -> dict[str, Any] | None:
    """Returns times, rates and drafts as vLLM defines them, or None if the turn has no timings.

    What is not shown is null.
    """
    times, count = ended.timings, ended.usage.output_tokens
    if times is None:
        return None
    drafts = {"speculative_decoding": _drafts_object(times.drafts, shown)}
    if not shown.times:
        return dict.fromkeys(_TIMES) | drafts
    decode = 1000 * (times.last_token - times.first_token)
    elapsed = times.last_token - times.first_scheduled
    values = (
        1000 * (times.first_token - times.first_scheduled),
        decode,
        1000 * (times.first_scheduled - times.arrival),
        decode / (count - 1) if count > 1 else None,
        count / elapsed if elapsed > 0 else None,
    )
    return dict(zip(_TIMES, values, strict=True)) | drafts


_TIMES = (
    "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second",
)  # fmt: skip


def _drafts_object(steps: bytes, shown: ShownMetrics) -> dict[str, Any] | None:
    """``steps``: ``ChunkTimings.drafts``."""
    if shown.drafts == "none" or not shown.most_drafts:
        return None
    drafted, accepted = steps[::2], steps[1::2]
    num_steps, num_drafted, num_accepted = len(drafted), sum(drafted), sum(accepted)
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else 1.0,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": [accepted.count(number) for number in range(shown.most_drafts + 1)],
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": shown.most_drafts,
    }
    if shown.drafts == "detailed":
        found |= {"per_step_accepted": list(accepted), "per_step_drafted": list(drafted)}
    return found


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


def version_field(ended: TurnEnded) -> dict[str, Any]:
    """Returns ``{"weight_versions": ...}`` of a choice; null if no token has a version."""
    keys = ("version", "start", "end")
    return {"weight_versions": [dict(zip(keys, s, strict=True)) for s in ended.weight_versions] or None}
