"""``Ops.make_sampler`` in plain torch: samples one token per row.

In order, on a copy of a row's logits: forbidden ids, early stop ids, and ids that the row's grammar does not
allow become -inf; division by temperature; top_k, then top_p within it, then min_p (``filters.py``); plus
Gumbel noise f(seed, position, token id) (``noise.py``); the largest wins. At temperature 0 the largest logit
wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from chorale.kernels.ops import NO_FINITE_LOGITS, NOTHING_ALLOWED, Allowed, SamplingInputs
from chorale.kernels.reference.sampling.filters import filter_scores
from chorale.kernels.reference.sampling.noise import gumbel_noise, token_steps
from chorale.kernels.reference.sampling.token_columns import TokenColumns


@dataclass(frozen=True, slots=True)
class Needs:
    """The work that some rows of a batch need. Skipping other work changes no token."""

    heat: bool  # whether some row has a temperature
    all_heat: bool  # whether every row has one
    filters: tuple[bool, bool, bool]  # whether some row uses top_k, top_p, min_p
    most_k: int  # the largest top_k in use


class ReferenceSampler:
    """Processes ``rows_at_once`` rows at a time.

    It keeps its scratch memory between steps: newly allocated memory would cost as much as the arithmetic
    (750 page faults, 1.3 ms, for one row of 201,088 logits on a CPU).
    """

    def __init__(
        self,
        forbidden: torch.Tensor,
        rows_at_once: int,
        first: int = 0,
        vocab_size: int | None = None,
        *,
        ids: torch.Tensor | None = None,
    ) -> None:
        """``forbidden`` [V] uint8: 1 for ids that are never sampled. ``first``: the id of column 0;
        ``vocab_size``: ids of the whole vocabulary. ``ids``: see ``MakeSampler``."""
        self.rows_at_once, self._first = rows_at_once, first
        steps = token_steps(first + len(forbidden), forbidden.device)[first:]
        self._columns = None if ids is None else TokenColumns(ids, len(forbidden))
        if ids is not None:
            forbidden, steps = forbidden[ids], steps[ids]
        self._vocab_size = vocab_size or len(forbidden)
        self._forbidden, self._steps = forbidden.nonzero().squeeze(1), steps
        self._biases = _bias_table(forbidden.device)
        shape = (rows_at_once, len(forbidden))
        self._scores, *self._space = (torch.empty(shape, device=forbidden.device) for _ in range(3))

    def __call__(
        self, logits: torch.Tensor, draws: SamplingInputs, last_token: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Sample logits [N, V] float32 -> out [N] int64, and ``last_token`` at ``draws.rows``.

        Waits for the device, to skip work that no row needs.
        """
        for some, scores in self.scored(logits, draws):
            out[some] = self.decide(scores, logits[some])
        last_token[draws.rows.long()] = out.clamp(min=0)

    def scored(self, logits: torch.Tensor, draws: SamplingInputs) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield some rows and their scores, of which the largest wins. The next iteration overwrites them."""
        if self._columns is not None:
            draws = self._columns.masks(draws)
        for start in range(0, len(logits), self.rows_at_once):
            some = slice(start, start + self.rows_at_once)
            scores, own = self.permitted(logits[some]), draws.at(some)
            if own.allowed is not None and int(own.allowed.index.max()) >= 0:
                self.forbid(scores, own.allowed)
            if own.early_stops is not None and int(own.early_stops[:, 0].max()) >= 0:
                self.forbid_stops(scores, own.early_stops)
            yield some, self.drawn(scores, own, _needs(own, self._vocab_size))

    def permitted(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy of at most ``rows_at_once`` rows with forbidden ids at -inf. The next call overwrites
        it."""
        return self._scores[: len(logits)].copy_(logits).index_fill_(1, self._forbidden, float("-inf"))

    def forbid(self, scores: torch.Tensor, allowed: Allowed) -> None:
        """Set ids that grammars do not allow to -inf in ``scores`` [N, V]."""
        octets = allowed.octets.index_select(0, allowed.index.clamp(min=0))
        bias = self._biases.index_select(0, octets.reshape(-1).int()).view(len(octets), -1)
        bias.masked_fill_((allowed.index < 0).unsqueeze(1), 0.0)
        scores += bias[:, : scores.shape[1]]

    def forbid_stops(self, scores: torch.Tensor, early_stops: torch.Tensor) -> None:
        """Set the ids ``early_stops`` [N, EARLY_STOPS] to -inf in ``scores`` [N, V]."""
        columns = early_stops.long() - self._first
        is_own = (early_stops >= 0) & (columns >= 0) & (columns < scores.shape[1])
        scores.scatter_add_(1, torch.where(is_own, columns, 0), torch.where(is_own, float("-inf"), 0.0))

    def choose(
        self, scores: torch.Tensor, logits: torch.Tensor, draws: SamplingInputs, needs: Needs
    ) -> torch.Tensor:
        """Return tokens [N] int64. ``scores`` [N, V]: the ``logits`` after all logits processors and masks;
        they are overwritten.

        A row without a token gets ``NO_FINITE_LOGITS`` or ``NOTHING_ALLOWED``. Never waits for the device.
        """
        return self.decide(self.drawn(scores, draws, needs), logits)

    def drawn(self, scores: torch.Tensor, draws: SamplingInputs, needs: Needs) -> torch.Tensor:
        """Return ``scores`` after temperature, filters and noise, of which the largest wins."""
        self.filter(scores, draws, needs)
        if needs.heat:
            space = (self._space[0][: len(scores)], self._space[1][: len(scores)])
            noise = gumbel_noise(draws.keys, self._steps, space)
            if not needs.all_heat:
                noise *= draws.temperature.unsqueeze(1) > 0
            scores = noise.add_(scores)
        return scores

    def filter(self, scores: torch.Tensor, draws: SamplingInputs, needs: Needs) -> None:
        """Divide ``scores`` by the temperature, and add ``NEGLIGIBLE`` to those that filters remove."""
        if needs.heat:
            space = (self._space[0][: len(scores)], self._space[1][: len(scores)])
            heat = draws.temperature.unsqueeze(1)
            scores.div_(torch.where(heat > 0, heat, 1.0))
            if draws.filters is not None and any(needs.filters):
                columns = zip(draws.filters.unbind(1), needs.filters, strict=True)
                top_k, top_p, min_p = (column if is_used else None for column, is_used in columns)
                filter_scores(scores, top_k, top_p, min_p, needs.most_k, space)

    def decide(self, scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return [N] int64: the token of the largest score, or the reason why the row has none."""
        token = scores.argmax(-1, keepdim=True)
        # The raw maximum is NaN if any logit is NaN (edits may hide it), and infinite if any is +inf.
        most = logits.amax(-1, keepdim=True)
        ids = token if self._columns is None else self._columns.ids[token]
        return token_or_reason(ids, scores.gather(1, token), most).squeeze(1)


def _needs(draws: SamplingInputs, vocab_size: int) -> Needs:
    heat = draws.temperature > 0
    if draws.filters is None:
        return Needs(bool(heat.any()), bool(heat.all()), (False, False, False), 0)
    top_k, top_p, min_p = draws.filters.unbind(1)
    limited = heat & (top_k < vocab_size)
    uses = bool(limited.any()), bool((heat & (top_p < 1)).any()), bool((heat & (min_p > 0)).any())
    most_k = int(torch.where(limited, top_k, 0).max())
    return Needs(bool(heat.any()), bool(heat.all()), uses, most_k)


def _bias_table(device: torch.device) -> torch.Tensor:
    """Return [256, 8] float32: the addends of eight scores for each byte of a mask, -inf where a bit is 0."""
    octets = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)
    return torch.where(octets.bitwise_and(1).bool(), 0.0, float("-inf"))


def token_or_reason(token: torch.Tensor, score: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """Return the token, or the reason why there is none. ``score``: the token's; ``most``: the largest raw
    logit."""
    why_none = torch.where(most.isfinite(), NOTHING_ALLOWED, NO_FINITE_LOGITS)
    return torch.where((score + most).isfinite(), token, why_none)
