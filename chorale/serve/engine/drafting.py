"""From the operator's speculative config to the engine's drafter, and to what its device drafts with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from chorale.config.engine import EngineConfig
from chorale.config.speculative import MOST_DRAFT_TOKENS, SpeculativeConfig
from chorale.engine.drafts.head import HeadDrafter
from chorale.engine.drafts.ngram import NgramDrafter
from chorale.engine.drafts.suffix import SuffixDrafter
from chorale.engine.scheduling.scheduler import PlanningDrafter
from chorale.kernels.ops import Ops
from chorale.model.config import ModelConfig
from chorale.model.draft.config import published_head
from chorale.model.draft.head import DraftHead
from chorale.model.draft.load import Target, load_head
from chorale.model.draft.random_head import random_head
from chorale.model.gpt_oss import GptOss
from chorale.model.hub import resolve_head
from chorale.parallel.rank import Rank
from chorale.runtime.build_executor import DTYPES
from chorale.runtime.device import Device
from chorale.runtime.drafts.setup import DraftSetup
from chorale.runtime.progress import Progress
from chorale.runtime.sizing.graph_sizes import MOST_DRAFTING_ROWS
from chorale.runtime.sizing.resolve import Resolved

CACHED_TOKENS = 65_536  # of answers that ended, for each cache_salt


def make_drafter(config: SpeculativeConfig | None) -> PlanningDrafter | None:
    """Returns the drafter of one engine."""
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
    return HeadDrafter(config.num_speculative_tokens, MOST_DRAFTING_ROWS)


def most_drafts(config: SpeculativeConfig | None) -> int:
    return 0 if config is None else config.num_speculative_tokens


def with_local_head(config: EngineConfig, progress: Progress | None) -> EngineConfig:
    """Returns the configuration with the folder of its head, which is downloaded if needed. Raises
    ``ConfigError``."""
    speculation = config.speculative_config
    if speculation is None or not speculation.has_head or speculation.model is None:
        return config
    folder = resolve_head(
        speculation.model,
        revision=speculation.revision,
        download_dir=config.download_dir,
        progress=progress,
    )
    return replace(
        config,
        speculative_config=replace(speculation, model=str(folder), revision=None, shown=speculation.model),
    )


def make_setup(
    config: SpeculativeConfig | None,
    folder: Path,
    model: GptOss,
    whole: ModelConfig,
    ops: Ops,
    resolved: Resolved,
    device: Device,
    rank: Rank | None,
) -> DraftSetup | None:
    """``folder``, ``whole``: the target's. ``ops``: of one rank. Raises ``ConfigError``."""
    if config is None:
        return None
    head = _load(config, folder, model, whole, ops, resolved, device, rank) if config.has_head else None
    return DraftSetup(config.num_speculative_tokens, head, ops, _conditional(config.acceptance))


def _load(
    config: SpeculativeConfig,
    folder: Path,
    model: GptOss,
    whole: ModelConfig,
    ops: Ops,
    resolved: Resolved,
    device: Device,
    rank: Rank | None,
) -> DraftHead:
    dtype, longest = DTYPES[resolved.dtype], resolved.limits.max_model_len + MOST_DRAFT_TOKENS
    target = device.torch_device
    embedding = model.weights.embedding
    if config.model is None:
        own = embedding if rank is None else None
        return random_head(
            published_head(whole), ops, device=target, dtype=dtype, max_len=longest, embedding=own
        )
    embed = None if rank is None else partial(model.ops.embed, embedding)
    return load_head(
        config.model,
        Target(whole, folder, embedding, embed),
        ops,
        device=target,
        dtype=dtype,
        max_len=longest,
    )


def _conditional(acceptance: tuple[float, ...]) -> tuple[float, ...]:
    """From the share of drafts whose first 1, 2, ... tokens are accepted to the probability of each token
    after those before it."""
    shares = (1.0, *acceptance)
    return tuple(after / before if before else 0.0 for before, after in pairwise(shares))
