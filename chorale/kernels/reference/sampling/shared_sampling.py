"""Sampling by several ranks, each of which has the logits of some token ids.

Noise is a function of (seed, position, token id), so each rank draws among its ids and the ranks compare: the
largest score wins, and of equal scores that of the lowest id, as on one rank. Filters need the whole row: the
ranks gather the logits, and each rank samples as if it were alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from chorale.kernels.ops import Allowed, SamplingInputs
from chorale.kernels.reference.sampling.sampling import ReferenceSampler, token_or_reason
from chorale.parallel.rank import Rank
from chorale.parallel.shares import vocabulary_shares


class SharedSampler(ReferenceSampler):
    """``ReferenceSampler`` over the ids of one rank."""

    def __init__(self, rank: Rank, forbidden: torch.Tensor, rows_at_once: int) -> None:
        """``forbidden`` [V] uint8 covers the whole vocabulary."""
        own = rank.share.vocabulary
        super().__init__(forbidden[own.start : own.stop], rows_at_once, own.start, len(forbidden))
        self._rank, self._all_forbidden = rank, forbidden

    @functools.cached_property
    def _whole(self) -> ReferenceSampler:
        return ReferenceSampler(self._all_forbidden, self.rows_at_once)

    def __call__(
        self, logits: torch.Tensor, draws: SamplingInputs, last_token: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Like ``ReferenceSampler``, with one exchange for all rows."""
        if draws.filters is not None:
            self._whole(gather_logits(self._rank, logits, self._vocab_size), draws, last_token, out)
            return
        parts = [self._best(scores, logits[some]) for some, scores in self.scored(logits, draws)]
        if parts:
            out.copy_(agree(torch.cat(parts, dim=1), self._rank.communicator.all_gather))
        last_token[draws.rows.long()] = out.clamp(min=0)

    def forbid(self, scores: torch.Tensor, allowed: Allowed) -> None:
        """``allowed`` covers the whole vocabulary."""
        super().forbid(scores, allowed_of(allowed, self._rank.share.vocabulary))

    def _best(self, scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return [3, N] float32: the largest score, its token id and the largest raw logit (NaN if any is
        NaN)."""
        best, column = scores.max(dim=-1)
        return torch.stack((best, (column + self._first).float(), logits.amax(-1)))


def make_shared_sampler(
    rank: Rank, forbidden: torch.Tensor, rows_at_once: int, *, ids: torch.Tensor | None = None
) -> ReferenceSampler:
    """``Ops.make_sampler`` for one of several ranks. With ``ids``, each rank has all columns."""
    if ids is not None:
        return ReferenceSampler(forbidden, rows_at_once, ids=ids)
    return SharedSampler(rank, forbidden, rows_at_once)


def gather_logits(rank: Rank, own: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return [N, V] float32 on every rank, from the logits [N, columns] of each rank's token ids."""
    shares = vocabulary_shares(vocab_size, rank.share.size)
    if missing := len(shares[0]) - own.shape[1]:  # the first rank has the longest share
        own = F.pad(own, (0, missing))
    everyone = rank.communicator.all_gather(own.contiguous())
    return torch.cat([part[:, : len(ids)] for part, ids in zip(everyone, shares, strict=True)], dim=1)


def allowed_of(allowed: Allowed, own: range) -> Allowed:
    """Return the masks of a rank's ids; shares of the vocabulary begin at a byte of the mask."""
    return Allowed(allowed.index, allowed.octets[:, own.start // 8 : -(-own.stop // 8)])


def agree(own: torch.Tensor, all_gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return tokens [N] int64 from each rank's result ``own`` [3, N] float32, in which ids below 2^24 are
    exact."""
    best, tokens, most = all_gather(own).unbind(1)  # [size, N] each
    winner = best.argmax(0, keepdim=True)  # of equal scores the first rank's, which has the lowest ids
    token = tokens.gather(0, winner).long()
    return token_or_reason(token, best.gather(0, winner), most.amax(0, keepdim=True)).squeeze(0)
