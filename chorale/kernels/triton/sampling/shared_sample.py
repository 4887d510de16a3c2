"""``sample.py`` for several ranks, each of which has the logits of some token ids.

Noise is a function of (seed, position, token id), so each rank draws among its ids and the ranks compare. The
ranks exchange the numbers that a row's filters need (``thresholds.py``), then three numbers per row, in the
kernel that chooses.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import NO_FINITE_LOGITS, NOTHING_ALLOWED, SamplingInputs
from chorale.kernels.reference.sampling.shared_sampling import allowed_of, gather_logits
from chorale.kernels.triton.launch import dependent, is_nvidia, wait_for_previous
from chorale.kernels.triton.reduce.memory import ROW_WORDS
from chorale.kernels.triton.reduce.rows import WORDS, RowExchange, swap_row
from chorale.kernels.triton.sampling.sample import best_of_pieces
from chorale.kernels.triton.sampling.sample import make_sampler as sampler_of_one_rank
from chorale.kernels.triton.sampling.thresholds import thresholds
from chorale.parallel.rank import Rank

_NONE, _FORBIDDEN = tl.constexpr(NO_FINITE_LOGITS), tl.constexpr(NOTHING_ALLOWED)
_WARPS = 4


@triton.jit(
    do_not_specialize=["rank", "rank_stride", "begin", "from_bytes", "pieces", "first"],
    do_not_specialize_on_alignment=["rows_ptr", "out_ptr"],
)
def _choose_kernel(
    best_ptr,  # [N, pieces] float32
    column_ptr,  # [N, pieces] int32
    most_ptr,  # [N, pieces] float32
    rows_ptr,  # [N] int32
    last_ptr,  # [rows] int64
    out_ptr,  # [N] int64
    own_ptr,  # [N, WORDS] float32
    all_ptr,  # [ranks, N, WORDS] float32
    rank_stride,
    peers_ptr,
    calls_ptr,
    status,
    begin,
    from_bytes,
    rank,
    pieces,
    first,  # the token id of column 0
    PIECES: tl.constexpr,
    THREADS: tl.constexpr,
    N: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the best of all pieces of all ranks; of equal scores the lowest id."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PIECES)
    inside = places < pieces
    best = tl.load(best_ptr + row * pieces + places, mask=inside, other=-float("inf"))
    columns = tl.load(column_ptr + row * pieces + places, mask=inside, other=2147483647)
    most = tl.max(tl.load(most_ptr + row * pieces + places, mask=inside, other=-float("inf")), 0)
    top = tl.max(best, 0)
    column = tl.min(tl.where(best == top, columns, 2147483647), 0)
    own_ptr += row * WORDS
    all_ptr += row * WORDS
    tl.store(own_ptr, top)
    tl.store(own_ptr + 1, (first + tl.where(top > -float("inf"), column, 0)).to(tl.float32))  # exact: < 2^24
    tl.store(own_ptr + 2, most)
    tl.store(own_ptr + 3, 0.0)
    swap_row(
        own_ptr, all_ptr, rank_stride, row, peers_ptr, calls_ptr, status, begin, from_bytes, rank,
        4, THREADS, N, ASM,
    )  # fmt: skip
    top = tl.load(all_ptr, cache_modifier=".cg")
    token = tl.load(all_ptr + 1, cache_modifier=".cg")
    most = tl.load(all_ptr + 2, cache_modifier=".cg")
    for other in tl.static_range(1, N):
        found = all_ptr + other * rank_stride
        score = tl.load(found, cache_modifier=".cg")
        token = tl.where(score > top, tl.load(found + 1, cache_modifier=".cg"), token)
        top = tl.maximum(top, score)
        others = tl.load(found + 2, cache_modifier=".cg")  # NaN if they did not arrive
        most = tl.maximum(most, others, propagate_nan=tl.PropagateNan.ALL)
    infinite = float("inf")
    chosen = tl.where((top > -infinite) & (top < infinite), token.to(tl.int64), _FORBIDDEN)
    chosen = tl.where((most > -infinite) & (most < infinite), chosen, _NONE)
    tl.store(out_ptr + row, chosen)
    tl.store(last_ptr + tl.load(rows_ptr + row), tl.maximum(chosen, 0))


class SharedSample:
    """``Sample`` for one rank. All ranks call it with the same numbers and their own logits.

    Without an exchange in kernels, or with more rows than it covers, the ranks gather the logits, and each
    samples as if it were alone.
    """

    def __init__(
        self, rank: Rank, forbidden: torch.Tensor, rows_at_once: int, exchange: RowExchange | None
    ) -> None:
        """``forbidden`` covers the whole vocabulary."""
        self._rank, self._own, self._exchange = rank, rank.share.vocabulary, exchange
        self._vocab, self._alone = len(forbidden), sampler_of_one_rank(forbidden, rows_at_once)
        self._forbidden = forbidden[self._own.start : self._own.stop].contiguous()

    def __call__(
        self, logits: torch.Tensor, draws: SamplingInputs, last_token: torch.Tensor, out: torch.Tensor
    ) -> None:
        exchange, first = self._exchange, self._own.start
        if exchange is None or not exchange.covers(len(logits)):
            self._alone(gather_logits(self._rank, logits, self._vocab), draws, last_token, out)
            return
        if draws.allowed is not None:
            draws = replace(draws, allowed=allowed_of(draws.allowed, self._own))
        edge = None
        if draws.filters is not None:
            edge = thresholds(logits, draws, self._forbidden, first, self._vocab, exchange)
        best, columns, most = best_of_pieces(logits, draws, self._forbidden, edge, first)
        count, pieces = best.shape
        own = torch.empty(count, ROW_WORDS, device=best.device)
        everyone = torch.empty(exchange.size, count, ROW_WORDS, device=best.device)
        _choose_kernel[(count,)](
            best, columns, most, draws.rows, last_token, out, own, everyone, count * ROW_WORDS,
            *exchange.arguments, pieces, first, PIECES=triton.next_power_of_2(pieces),
            THREADS=32 * _WARPS, N=exchange.size, ASM=is_nvidia(best.device), num_warps=_WARPS,
            **dependent(best),
        )  # fmt: skip
