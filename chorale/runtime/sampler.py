"""Sampler: from logits to one token a row. One code path, on the device, every row by itself.

In order, on a copy of the row's logits:

 1. ids that are no tokens (reserved, ``<|startoftext|>``, padding) become -inf, and so does what the row's
    grammar does not allow (``grammar.py``)
 2. the row's edits: logit_bias, allowed_token_ids, bad_words, min_tokens, penalties (``edits.py``)
 3. division by temperature
 4. top_k, then top_p within it, then min_p (``filters.py``)
 5. plus Gumbel noise f(seed, position, token id) (``noise.py``), and the largest wins

Temperature 0 leaves out 3 to 5. Where the ops have kernels for all but masks and edits (``Ops.sample``), rows
without those take them: which way a row goes depends on the row alone. A row's token is a function of its own
logits, parameters, seed and position: batch and chunking cannot change it. A row with a NaN or infinite
logit, or with every token forbidden, gives no token; the others of the batch are not touched by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from chorale.kernels.ops import NO_FINITE_LOGITS, NOTHING_ALLOWED, Allowed, Draws
from chorale.runtime.batch import SamplingBatch
from chorale.runtime.device import Device
from chorale.runtime.filters import filter_scores
from chorale.runtime.grammar import Masks
from chorale.runtime.noise import gumbel_noise, token_steps

NO_TOKEN, FORBIDDEN = NO_FINITE_LOGITS, NOTHING_ALLOWED
Space = tuple[torch.Tensor, torch.Tensor]
Fused = Callable[[torch.Tensor, Draws, torch.Tensor, torch.Tensor, torch.Tensor], None]
# Of the o200k_harmony vocabulary: special ids without a meaning, and what the embedding is padded with.
RESERVED_IDS = (199998, 200000, 200001, 200004, 200009, 200010, 200011, *range(200013, 201088))


class Sampler:
    """``forbidden``: ids that can never be sampled; those past the vocabulary are ignored. ``fused``:
    ``Ops.sample``."""

    def __init__(
        self,
        device: Device,
        vocab_size: int,
        forbidden: Iterable[int] = RESERVED_IDS,
        fused: Fused | None = None,
    ) -> None:
        target = device.torch_device
        self._device, self._fused = device, fused
        self._rows_at_once = device.sample_rows
        known = [token for token in forbidden if 0 <= token < vocab_size]
        self._forbidden = torch.tensor(known, dtype=torch.int64, device=target)
        self._is_forbidden = torch.zeros(vocab_size, dtype=torch.uint8, device=target)
        self._is_forbidden[self._forbidden] = 1
        self._steps = token_steps(vocab_size, target)
        # Kept from step to step: fresh pages for these would cost as much as the arithmetic (750 faults,
        # 1.3 ms, for one row on a CPU).
        self._space = [torch.empty(self._rows_at_once, vocab_size, device=target) for _ in range(3)]

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, masks: Masks | None = None) -> torch.Tensor:
        """[N] int64 tokens for ``logits`` [N, V] float32, which stays as it was.

        A row without a token: ``NO_TOKEN`` or ``FORBIDDEN``.
        """
        if not len(batch):
            return torch.zeros(0, dtype=torch.int64, device=logits.device)
        if self._fused is not None:
            return self._sample_fused(self._fused, logits, batch, masks)
        size = self._rows_at_once
        parts = [
            self._sample(logits[start : start + size], batch, slice(start, start + size), masks)
            for start in range(0, len(batch), size)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _sample_fused(
        self, fused: Fused, logits: torch.Tensor, batch: SamplingBatch, masks: Masks | None
    ) -> torch.Tensor:
        """All rows by the kernel, grammars included, and those with edits once again."""
        count, target = len(batch), logits.device
        tokens = torch.empty(count, dtype=torch.int64, device=target)
        filters = None
        if batch.filtered.any():
            filters = torch.stack((batch.top_k, batch.top_p, batch.min_p), dim=1)
        rows = torch.arange(count, dtype=torch.int32, device=target)
        allowed = None if masks is None else self._allowed(masks, count)
        draws = Draws(batch.keys, batch.temperature, rows, filters, allowed)
        fused(logits, draws, self._is_forbidden, torch.empty_like(tokens), tokens)
        needy = np.array(sorted(batch.edits), np.int64)
        for start in range(0, len(needy), self._rows_at_once):
            places = needy[start : start + self._rows_at_once]
            index = self._device.upload(places.astype(np.int32)).long()
            own = None if masks is None else masks.at(places)
            some = self._sample(logits[index], batch.at(places, index), slice(0, len(places)), own)
            tokens.index_copy_(0, index, some)
        return tokens

    def _allowed(self, masks: Masks, count: int) -> Allowed:
        index = np.full(count, -1, np.int32)
        index[masks.places] = np.arange(len(masks.places), dtype=np.int32)
        return Allowed(self._device.upload(index), masks.octets)

    def draw(self, logits: torch.Tensor, draws: Draws, last_token: torch.Tensor, out: torch.Tensor) -> None:
        """Without masks and edits, in static memory: ``Ops.sample``, or what it means in plain torch."""
        if self._fused is not None:
            self._fused(logits, draws, self._is_forbidden, last_token, out)
            return
        for start in range(0, len(logits), self._rows_at_once):
            some = slice(start, start + self._rows_at_once)
            raw, temperature = logits[some], draws.temperature[some].unsqueeze(1)
            scores, *space = (room[: len(raw)] for room in self._space)
            scores.copy_(raw).index_fill_(1, self._forbidden, float("-inf"))
            heat = scores / temperature
            if draws.filters is not None:
                columns = draws.filters[some].unbind(1)
                filter_scores(heat, *columns, most_k=heat.shape[1], space=(space[0], space[1]))
            heat += gumbel_noise(draws.keys[some], self._steps, (space[0], space[1]))
            out[some] = _decide(torch.where(temperature > 0, heat, scores), raw)
        last_token[draws.rows.long()] = out.clamp(min=0)

    def _sample(
        self, logits: torch.Tensor, batch: SamplingBatch, place: slice, masks: Masks | None
    ) -> torch.Tensor:
        """A few rows at once. What no row of them needs is left out, and is a no-op for those that do not."""
        temperature = batch.temperature[place].unsqueeze(1)
        scores, *space = (room[: len(logits)] for room in self._space)
        scores.copy_(logits).index_fill_(1, self._forbidden, float("-inf"))
        if masks is not None:
            masks.apply(scores, place.start)
        for row in range(len(logits)):
            edits = batch.edits.get(place.start + row)
            if edits is not None:
                edits.apply(scores[row], int(batch.positions[place.start + row]))
        if not batch.greedy[place].all():
            scores.div_(torch.where(temperature > 0, temperature, 1.0))
            self._filter(scores, batch, place, (space[0], space[1]))
            scores = self._noisy(scores, batch, place, (space[0], space[1]))
        return _decide(scores, logits)

    def _filter(self, scores: torch.Tensor, batch: SamplingBatch, place: slice, space: Space) -> None:
        uses = batch.filtered[place].any(axis=0)
        if not uses.any():
            return
        columns = (batch.top_k, batch.top_p, batch.min_p)
        chosen = [column[place] if use else None for column, use in zip(columns, uses, strict=True)]
        filter_scores(scores, *chosen, most_k=int(batch.top_ks[place].max()), space=space)

    def _noisy(self, scores: torch.Tensor, batch: SamplingBatch, place: slice, space: Space) -> torch.Tensor:
        noise = gumbel_noise(batch.keys[place], self._steps, space)
        if batch.greedy[place].any():
            noise *= torch.from_numpy(~batch.greedy[place]).to(noise).unsqueeze(1)
        return noise.add_(scores)


def _decide(scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[N] int64: the token of the largest score, or why there is none."""
    token = scores.argmax(-1, keepdim=True)
    # The raw maximum is NaN if any logit is (edits may hide one), and infinite if any is +inf.
    most = logits.amax(-1, keepdim=True)
    why_none = torch.where(most.isfinite(), FORBIDDEN, NO_TOKEN)
    sound = (scores.gather(1, token) + most).isfinite()
    return torch.where(sound, token, why_none).squeeze(1)
