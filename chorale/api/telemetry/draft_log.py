"""vLLM's periodic log line about speculative decoding."""

from __future__ import annotations

from chorale.client.summary import add_columns
from chorale.engine.types import EngineStats


class DraftLog:
    """Formats the lines of one engine. ``now``: seconds of any monotonic clock."""

    def __init__(self, stats: EngineStats, now: float, engine: int = 0) -> None:
        self._engine, self._stats, self._time = engine, stats, now

    def line(
        self, stats: EngineStats, now: float, num_positions: int, *, is_synthetic: bool = False
    ) -> str | None:
        """Returns a line about the time since the last call, or None if no step verified a draft.

        ``num_positions``: tokens of the longest possible draft. The acceptance length counts the token after
        the draft, too.
        """
        before, seconds = self._stats, max(now - self._time, 1e-9)
        self._stats, self._time = stats, now
        if stats.num_steps < before.num_steps:  # a restarted engine counts from zero
            before = EngineStats()
        drafts = stats.num_drafts - before.num_drafts
        if not drafts:
            return None
        drafted = stats.num_draft_tokens - before.num_draft_tokens
        accepted = stats.num_accepted_tokens - before.num_accepted_tokens
        old = [-count for count in before.accepted_per_position]
        counts = add_columns([stats.accepted_per_position, old, (0,) * num_positions])
        rates = ", ".join(f"{count / drafts:.3f}" for count in counts)
        label = "SYNTHETIC ACCEPTANCE, the output has no meaning: " if is_synthetic else ""
        return (
            f"Engine {self._engine:03}: {label}SpecDecoding metrics: "
            f"Mean acceptance length: {1 + accepted / drafts:.2f}, "
            f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
            f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
            f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
            f"Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"
        )
