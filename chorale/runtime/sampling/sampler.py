"""Sampler: turns logits into one token per row, on the device, each row independently.

In this order, on a copy of the row's logits:

 1. ids that are not tokens (reserved, ``<|startoftext|>``, padding), stop ids before min_tokens, and ids that
    the row's grammar does not allow (``grammar.py``) become -inf
 2. the row's logits processors: logit_bias, allowed_token_ids, bad_words, penalties
 3. division by temperature
 4. min_p, then top_k, then top_p of the mass that these keep: vLLM's order
 5. plus Gumbel noise f(seed, position, token id), and the largest wins

Temperature 0 skips 3 to 5. ``Ops.make_sampler`` does all except 2. Rows with logits processors (see
``logits_processors.py``) use the plain torch of ``kernels/reference/sampling/sampling.py`` on GPUs and NPUs,
and ``kernels/cpu/sampler.py`` on a CPU, so the implementation that samples a row depends on that row alone. A
row's token is a function of its own logits, parameters, seed and position; batch and chunking cannot change
it. A row with a NaN or infinite logit, or with every token forbidden, gets no token and does not affect the
others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from chorale.config.engine import LogprobsMode
from chorale.kernels.ops import NO_FINITE_LOGITS, NOTHING_ALLOWED, MakeSampler, SamplingInputs
from chorale.kernels.reference.sampling.filters import NEGLIGIBLE
from chorale.kernels.reference.sampling.sampling import Needs, ReferenceSampler
from chorale.kernels.reference.sampling.shared_sampling import gather_logits
from chorale.parallel.rank import Rank
from chorale.runtime.device import Device
from chorale.runtime.sampling.batch import SamplingBatch
from chorale.runtime.sampling.logprobs import LogprobTensors, gather_logprobs, shared_logprobs

NO_TOKEN, FORBIDDEN = NO_FINITE_LOGITS, NOTHING_ALLOWED
# Ids of the o200k_harmony vocabulary that are not tokens: special ids without a meaning, and padding.
RESERVED_IDS = (199998, 200000, 200001, 200004, 200009, 200010, 200011, *range(200013, 201088))


class Sampler:
    """Samples a step's rows; ``draw`` is the part that a graph may contain."""

    def __init__(
        self,
        device: Device,
        vocab_size: int,
        forbidden: Iterable[int] = RESERVED_IDS,
        make_sampler: MakeSampler = ReferenceSampler,
        rank: Rank | None = None,
        gather_few: Callable[[torch.Tensor], torch.Tensor] | None = None,
        mode: LogprobsMode = "raw_logprobs",
        *,
        row_by_row: bool = False,
    ) -> None:
        """``forbidden``: ids that are never sampled; ids outside the vocabulary are ignored. ``rank``: logits
        cover its token ids only; None: the whole vocabulary. ``gather_few``: see ``Ops``. ``row_by_row``:
        torch computes each row alone, because the order of its additions depends on the number of rows.
        """
        self._device, self._rank = device, rank
        self._gather_few = gather_few
        self._is_processed, self._is_logits = mode.startswith("processed"), mode.endswith("logits")
        known = [token for token in forbidden if 0 <= token < vocab_size]
        is_forbidden = torch.zeros(vocab_size, dtype=torch.uint8)
        is_forbidden[torch.tensor(known, dtype=torch.int64)] = 1
        self.forbidden = is_forbidden.to(device.torch_device)
        # (logits [N, V] float32, draws, last_token, out [N] int64): samples rows without processors, in
        # static memory
        self.draw = make_sampler(self.forbidden, device.sample_rows)
        self._rows = 1 if row_by_row else device.sample_rows  # for torch at once

    @functools.cached_property
    def _plain(self) -> ReferenceSampler:
        """The sampler of rows with edited logits, which are rare: the back end's, if it is built on the
        reference."""
        if self._rank is None and isinstance(self.draw, ReferenceSampler):
            return self.draw
        return ReferenceSampler(self.forbidden, self._rows)

    def logprobs(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        num_top: int,
        named: torch.Tensor | None = None,
        *,
        is_whole: bool = False,
    ) -> LogprobTensors:
        """Return the log-probabilities of ``token_ids`` [M], one per row of ``logits``, a few rows at a time.

        ``named``: as in ``gather_logprobs``. ``is_whole``: every rank has all columns of ``logits``.
        """
        gather: Callable[..., LogprobTensors] = gather_logprobs
        if self._rank is not None and not is_whole:
            all_gather = self._gather_few or self._rank.communicator.all_gather
            own = self._rank.share.vocabulary
            gather = partial(shared_logprobs, own, all_gather)
        pairs = zip(logits.split(self._rows), token_ids.split(self._rows), strict=True)
        parts = [gather(some, ids, num_top, named, as_logits=self._is_logits) for some, ids in pairs]
        return LogprobTensors(*map(torch.cat, zip(*parts, strict=True)))

    def logprobs_at(
        self,
        sample: int,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        batch: SamplingBatch,
        named: torch.Tensor | None = None,
    ) -> LogprobTensors:
        """Return the log-probabilities of one sample of a batch, whose tokens are ``tokens`` [N].

        In a processed mode they are those of the distribution that the token was drawn from. Tokens that are
        masked or filtered have -inf. The token itself never has: its filter may have rounded otherwise.
        """
        num_top, own = int(batch.state.num_logprobs[batch.rows[sample]]), slice(sample, sample + 1)
        logits, token = logits[own], tokens[own].clamp(min=0)
        if not self._is_processed:
            return self.logprobs(logits, token, num_top, named)
        batch = batch.at(np.array([sample]), torch.arange(sample, sample + 1, device=logits.device))
        if self._rank is not None:
            logits = gather_logits(self._rank, logits, len(self.forbidden))
        scores = self._processed(logits, batch)
        draws = _draws(batch)
        heat = draws.temperature.unsqueeze(1)
        chosen = scores.gather(1, token.unsqueeze(1)).div_(torch.where(heat > 0, heat, 1.0))
        self._plain.filter(scores, draws, _needs(batch))
        scores.masked_fill_(scores <= NEGLIGIBLE / 2, float("-inf")).scatter_(1, token.unsqueeze(1), chosen)
        return self.logprobs(scores, token, num_top, named, is_whole=True)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Return tokens [N] int64 for ``logits`` [N, V] float32, which is not changed.

        A row without a token gets ``NO_TOKEN`` or ``FORBIDDEN``.
        """
        tokens = torch.empty(len(batch), dtype=torch.int64, device=logits.device)
        processed = np.array(sorted(batch.processors), np.int64)
        if len(processed) < len(batch):
            rows = torch.arange(len(batch), dtype=torch.int32, device=logits.device)
            self.draw(logits, replace(_draws(batch), rows=rows), torch.empty_like(tokens), tokens)
        for start in range(0, len(processed), self._rows):
            samples = processed[start : start + self._rows]
            index = self._device.upload(samples.astype(np.int32)).long()
            own, some = batch.at(samples, index), logits[index]
            if self._rank is not None:
                some = gather_logits(self._rank, some, len(self.forbidden))
            scores = self._processed(some, own)
            tokens.index_copy_(0, index, self._plain.choose(scores, some, _draws(own), _needs(own)))
        return tokens

    def _processed(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Return a copy of a few rows after masks and logits processors. The next call overwrites it."""
        scores = self._plain.permitted(logits)
        if batch.inputs.allowed is not None:
            self._plain.forbid(scores, batch.inputs.allowed)
        if batch.inputs.early_stops is not None:
            self._plain.forbid_stops(scores, batch.inputs.early_stops)
        for row, processors in batch.processors.items():
            processors.apply(scores[row], int(batch.positions[row]))
        return scores


def _draws(batch: SamplingBatch) -> SamplingInputs:
    """Return the batch's inputs without filters if no row has one."""
    return batch.inputs if batch.state.filters[batch.rows].any() else replace(batch.inputs, filters=None)


def _needs(batch: SamplingBatch) -> Needs:
    """Compute the needed work from host arrays, so that nothing waits for the device."""
    state, rows = batch.state, batch.rows
    uses_k, uses_p, uses_m = np.any(state.filtered[rows], axis=0).tolist()
    heat = ~state.greedy[rows]
    return Needs(bool(heat.any()), bool(heat.all()), (uses_k, uses_p, uses_m), int(state.top_ks[rows].max()))
