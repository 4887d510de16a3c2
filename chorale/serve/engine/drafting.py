"""From the operator's speculative config to the engine's drafter."""

from __future__ import annotations

from chorale.engine.drafts.drafter import Drafter
from chorale.engine.drafts.ngram import NgramDrafter
from chorale.engine.drafts.suffix import SuffixDrafter
from chorale.speculative.config import SpeculativeConfig

CACHED_TOKENS = 65_536  # of answers that ended, for each cache_salt


def make_drafter(config: SpeculativeConfig | None) -> Drafter | None:
    """Returns the drafter of one engine if drafts are made on the host, else None."""
    if config is None:
        return None
    if config.method == "ngram":
        return NgramDrafter(config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        return SuffixDrafter(
            config.num_speculative_tokens,
            most=config.suffix_decoding_max_tree_depth,
            factor=config.suffix_decoding_max_spec_factor,
            capacity=CACHED_TOKENS if config.suffix_decoding_max_cached_requests else 0,
        )
    return None


def most_drafts(config: SpeculativeConfig | None) -> int:
    return 0 if config is None else config.num_speculative_tokens
