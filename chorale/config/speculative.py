"""SpeculativeConfig: how tokens are drafted. ``read_speculative`` creates it from the operator's JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from chorale.errors import ConfigError

Method = Literal["ngram", "suffix", "eagle3", "dflash", "synthetic"]
METHODS: tuple[Method, ...] = ("ngram", "suffix", "eagle3", "dflash", "synthetic")
MOST_DRAFT_TOKENS = 16
USUAL_NGRAM = 5  # vLLM's default
USUAL_ROWS = 64  # without ranges, larger steps have no drafts: drafts pay in small batches
Rows = Annotated[int, Meta(ge=1, le=2**31)]
Length = Annotated[int, Meta(ge=1, le=1024)]  # tokens, or ranks
Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The way in which tokens are drafted. ``read_speculative`` checks the values."""

    method: Method
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MOST_DRAFT_TOKENS)]  # at most, per row and step
    model: str | None = None  # folder or hub id of the head; None with synthetic acceptance: a random head
    parallel_drafting: bool | None = None  # whether the head must be P-EAGLE's; None: its files say it
    revision: str | None = None
    shown: str = ""  # the model's name as given, after ``model`` became a folder of the hub's cache
    draft_tensor_parallel_size: Length | None = None  # 1 or the model's size; the head is replicated
    prompt_lookup_min: Length = USUAL_NGRAM  # ngram: tokens of the shortest and the longest match
    prompt_lookup_max: Length = USUAL_NGRAM
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=1024)] = 24  # longest match, in tokens
    # 0: other answers are not looked up
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0, le=2**31)] = 10_000
    # Draft tokens for each token of the match.
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0, le=1e300)] = 1.0
    # (fewest rows, most rows, draft tokens), from 1 row on. Between two ranges, and after the last, the
    # preceding range applies. If empty, up to ``USUAL_ROWS`` rows draft ``num_speculative_tokens`` each.
    num_speculative_tokens_per_batch_size: tuple[tuple[Rows, Rows, Annotated[int, Meta(ge=0)]], ...] = ()
    disable_by_batch_size: Rows | None = None  # no drafts in steps with at least this many rows
    # Benchmarks only: the share of drafts whose first 1, 2, ... tokens are accepted, whichever they are. The
    # output then has no meaning.
    acceptance: tuple[Share, ...] = ()

    @property
    def has_head(self) -> bool:
        """Returns whether a head on the device computes the drafts."""
        return self.method in ("eagle3", "dflash", "synthetic")

    @property
    def tokens_by_rows(self) -> tuple[tuple[int, int], ...]:
        """Returns (fewest rows, draft tokens) of each range in order; 0 tokens where drafts end."""
        ranges, off = self.num_speculative_tokens_per_batch_size, self.disable_by_batch_size
        if not ranges:
            ranges, off = ((1, 1, self.num_speculative_tokens),), off or USUAL_ROWS + 1
        if off is None:
            return tuple((low, count) for low, _, count in ranges)
        return (*((low, count) for low, _, count in ranges if low < off), (off, 0))

    @property
    def is_synthetic(self) -> bool:
        """Returns whether acceptance is drawn from a profile, so that the output has no meaning."""
        return bool(self.acceptance)

    def __str__(self) -> str:
        """Returns the line for banner and log."""
        model = self.shown or self.model
        name = f"{self.method} ({model})" if model else self.method
        text = f"{name}, up to {self.num_speculative_tokens} draft tokens"
        if self.num_speculative_tokens_per_batch_size:
            ranges = self.num_speculative_tokens_per_batch_size
            text += " (" + ", ".join(f"{count} at {lo}-{hi} rows" for lo, hi, count in ranges) + ")"
        if self.disable_by_batch_size is not None:
            text += f", none from {self.disable_by_batch_size} rows on"
        if self.is_synthetic:
            rates = ", ".join(f"{rate:g}" for rate in self.acceptance)
            text += f"; SYNTHETIC ACCEPTANCE {rates}: the output has no meaning"
        return text


def check_ranks_of_head(config: SpeculativeConfig, ranks: int) -> None:
    """Raises ``ConfigError`` for a head with a number of ranks other than 1 or the model's."""
    size = config.draft_tensor_parallel_size
    if size not in (None, 1, ranks):
        raise ConfigError(
            f"draft_tensor_parallel_size {size}: must be 1 or --tensor-parallel-size ({ranks}); "
            "in both cases each rank has the whole head"
        )
