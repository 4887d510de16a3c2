"""For logits of a subset of tokens, as in a draft head: converts masks by token id to masks by column."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from chorale.kernels.ops import Allowed, SamplingInputs

_NO_COLUMN = 2**31 - 1  # an early stop without a column; -1 has another meaning


class TokenColumns:
    """Converts masks. Never waits for the device, so a graph may contain it."""

    def __init__(self, ids: torch.Tensor, vocab_size: int) -> None:
        """``ids`` [columns] int64: the token id of each column."""
        self.ids = ids
        self._places = ids // 8
        self._shifts = (ids % 8).to(torch.uint8)
        self._weights = (1 << torch.arange(8, device=ids.device)).to(torch.uint8)
        self._column = torch.full((vocab_size,), _NO_COLUMN, dtype=torch.int32, device=ids.device)
        self._column[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)

    def masks(self, draws: SamplingInputs) -> SamplingInputs:
        """Returns the draws with their masks by column."""
        allowed, stops = draws.allowed, draws.early_stops
        if allowed is not None:
            allowed = Allowed(allowed.index, self._packed(allowed.octets))
        if stops is not None:
            known = self._column[stops.clamp(0, len(self._column) - 1).long()]
            stops = torch.where(stops < 0, -1, torch.where(stops < len(self._column), known, _NO_COLUMN))
        return replace(draws, allowed=allowed, early_stops=stops)

    def _packed(self, octets: torch.Tensor) -> torch.Tensor:
        """octets [G, V / 8] -> [G, columns / 8], rounded up."""
        bits = octets.index_select(1, self._places) >> self._shifts & 1
        bits = F.pad(bits, (0, -len(self.ids) % 8)).view(len(octets), -1, 8)
        return (bits * self._weights).sum(-1, dtype=torch.uint8)
