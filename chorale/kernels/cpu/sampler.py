"""Sampling of the CPU back end: one pass over the logits, three passes for rows with filters."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from chorale.kernels.cpu.library import Sampling, library
from chorale.kernels.ops import NO_FINITE_LOGITS, NOTHING_ALLOWED, SamplingInputs
from chorale.kernels.reference.sampling.sampling import Needs, ReferenceSampler


class CpuSampler(ReferenceSampler):
    """A sampler in C++. Columns that are not the whole vocabulary are sampled by the reference."""

    def __init__(
        self, forbidden: torch.Tensor, rows_at_once: int, *, ids: torch.Tensor | None = None
    ) -> None:
        super().__init__(forbidden, rows_at_once, ids=ids)
        self._mask = forbidden.to(torch.uint8).contiguous()

    def __call__(
        self, logits: torch.Tensor, draws: SamplingInputs, last_token: torch.Tensor, out: torch.Tensor
    ) -> None:
        if self._columns is not None:
            super().__call__(logits, draws, last_token, out)
            return
        found = self._found(logits, draws)
        out.copy_(found)
        last_token[draws.rows.long()] = found.clamp(min=0)

    def choose(
        self, scores: torch.Tensor, logits: torch.Tensor, draws: SamplingInputs, needs: Needs
    ) -> torch.Tensor:
        if self._columns is not None:
            return super().choose(scores, logits, draws, needs)
        found = self._found(scores, replace(draws, allowed=None, early_stops=None))  # in ``scores`` already
        # The reason depends on the raw logits, but the library has seen the processed ones.
        is_finite = logits.amax(-1).isfinite()
        return torch.where(is_finite, found.where(found >= 0, NOTHING_ALLOWED), NO_FINITE_LOGITS)

    def _found(self, logits: torch.Tensor, draws: SamplingInputs) -> torch.Tensor:
        """Return [N] int64: a token for each row, or the reason why it has none."""
        logits, keys = logits.contiguous(), draws.keys.contiguous()
        temperature, allowed, stops = draws.temperature.contiguous(), draws.allowed, draws.early_stops
        index = None if allowed is None else allowed.index.contiguous()
        stops = None if stops is None else stops.contiguous()
        filters = None if draws.filters is None else draws.filters.contiguous()
        given = Sampling(
            logits.data_ptr(), keys.data_ptr(), temperature.data_ptr(), self._mask.data_ptr(),
            None if index is None else index.data_ptr(),
            None if allowed is None else allowed.octets.data_ptr(),
            None if stops is None else stops.data_ptr(),
            None if filters is None else filters.data_ptr(), *logits.shape,
            0 if allowed is None else allowed.octets.stride(0), 0 if stops is None else stops.stride(0),
        )  # fmt: skip
        found = torch.empty(len(logits), dtype=torch.int64)
        library().functions.sample(ctypes.addressof(given), found.data_ptr())
        return found
