"""Acceptance of drafts during a measurement: vLLM's printed section and result keys."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chorale.engine.types import EngineStats

SYNTHETIC = "synthetic acceptance: the output has no meaning"
_SAMPLE = re.compile(
    r'^vllm:spec_decode_(num_\w+?)(?:_total)?\{(?:[^}]*position="(\d+)")?[^}]*\} ([0-9.eE+]+)$', re.MULTILINE
)
_SYNTHETIC = re.compile(r'^chorale:speculation_info\{[^}]*synthetic="true"[^}]*\} 1', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counters of a server or an engine since its start."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    per_position: tuple[int, ...] = ()
    is_synthetic: bool = False

    @classmethod
    def of_engine(cls, stats: EngineStats) -> DraftCounts:
        return cls(
            stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens, stats.accepted_per_position
        )

    @classmethod
    def of_metrics(cls, text: str) -> DraftCounts | None:
        """Sums the counters of all engines in the text of /metrics. Returns None if there are none."""
        sums: defaultdict[str, int] = defaultdict(int)
        for name, position, value in _SAMPLE.findall(text):
            sums[name + position] += int(float(value))
        if "num_drafts" not in sums:
            return None
        prefix = "num_accepted_tokens_per_pos"
        count = sum(name.startswith(prefix) for name in sums)
        positions = tuple(sums[f"{prefix}{position}"] for position in range(count))
        return cls(
            sums["num_drafts"],
            sums["num_draft_tokens"],
            sums["num_accepted_tokens"],
            positions,
            bool(_SYNTHETIC.search(text)),
        )

    def since(self, before: DraftCounts) -> DraftCounts:
        old = [*before.per_position, *[0] * len(self.per_position)]
        return DraftCounts(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            tuple(now - then for now, then in zip(self.per_position, old, strict=False)),
            self.is_synthetic,
        )

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step with a draft, including the one after the accepted tokens."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Percentage of the draft tokens that were accepted."""
        return 100 * self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def rates(self) -> Sequence[float]:
        """Share of the drafts whose token at each position was accepted."""
        return [count / self.drafts for count in self.per_position] if self.drafts else []

    def to_json(self) -> dict[str, Any]:
        """Returns the keys of vLLM's result file. Without drafts, there are no rates and lengths."""
        found: dict[str, Any] = {"synthetic_acceptance": True} if self.is_synthetic else {}
        if self.drafts:
            found |= {
                "spec_decode_acceptance_rate": self.acceptance_rate,
                "spec_decode_acceptance_length": self.acceptance_length,
                "spec_decode_num_drafts": self.drafts,
                "spec_decode_draft_tokens": self.draft_tokens,
                "spec_decode_accepted_tokens": self.accepted_tokens,
                "spec_decode_per_position_acceptance_rates": list(self.rates),
            }
        return found
