"""RowSamplingState: the sampling parameters of every row, set when a sequence takes the row.

Parameters that every row has are in columns; rows that need more have objects in a dict.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from chorale.engine.types import EARLY_STOPS, RowStart
from chorale.kernels.reference.sampling.noise import key_bases, row_keys, wrap_seed
from chorale.runtime.sampling.logits_processors import LogitsProcessors

GREEDY_BELOW = 1e-5  # vLLM's bound: a smaller temperature means greedy
IntRows = npt.NDArray[np.int32]
DRAFT_NUMBERS = 2 + 2 + EARLY_STOPS + 4


@dataclass(frozen=True, slots=True)
class PromptLogprobsSpec:
    """A row's request for prompt_logprobs: its prompt, and the number of alternatives."""

    token_ids: IntRows
    num_top: int


class RowSamplingState:
    """Owns the sampling parameters of rows; the methods gather the parameters of a step."""

    def __init__(self, num_rows: int, vocab_size: int, max_len: int, device: torch.device) -> None:
        self._vocab_size, self._max_len, self._device = vocab_size, max_len, device
        self.greedy = np.zeros(num_rows, np.bool_)
        self.needs_resampling = np.zeros(num_rows, np.bool_)  # has processors, a grammar or log-probabilities
        self.filters = np.zeros(num_rows, np.bool_)  # uses top_k, top_p or min_p
        self.num_logprobs: IntRows = np.full(num_rows, -1, np.int32)
        self.top_ks: IntRows = np.zeros(num_rows, np.int32)
        self._early_stops: IntRows = np.full((num_rows, EARLY_STOPS), -1, np.int32)
        self._may_stop_at = np.zeros(num_rows, np.int64)  # first position where a stop id is allowed
        self._seeds = np.zeros(num_rows, np.uint64)
        self.filtered = np.zeros((num_rows, 3), np.bool_)  # uses top_k, top_p, min_p
        self._floats = np.zeros((num_rows, 4), np.float32)  # temperature (0: greedy), top_k, top_p, min_p
        self.named: dict[int, torch.Tensor] = {}  # [1, K] int64: ids of ``logprob_token_ids``
        self._edits: dict[int, LogitsProcessors] = {}
        self.prompts: dict[int, PromptLogprobsSpec] = {}

    def start(self, start: RowStart) -> None:
        """Set a row's parameters: on admission, and again after a preemption."""
        row, spec = start.row, start.sampling
        self.greedy[row] = greedy = spec.temperature < GREEDY_BELOW
        self.num_logprobs[row] = -1 if spec.logprobs is None else spec.logprobs
        self._seeds[row] = wrap_seed(start.seed)
        top_k = self._vocab_size if spec.top_k <= 0 else min(spec.top_k, self._vocab_size)
        self._floats[row] = (0.0 if greedy else spec.temperature, top_k, spec.top_p, spec.min_p)
        self.top_ks[row] = top_k if top_k < self._vocab_size and not greedy else 0
        uses = (top_k < self._vocab_size, spec.top_p < 1.0, spec.min_p > 0.0)
        self.filtered[row] = uses if not greedy else False
        self.filters[row] = any(self.filtered[row])
        stops = start.eos_token_ids[:EARLY_STOPS]
        self._early_stops[row] = (*stops, *(-1,) * (EARLY_STOPS - len(stops)))
        self._may_stop_at[row] = start.num_prompt_tokens + spec.min_tokens
        needs_processors = LogitsProcessors.needed(start)
        self.needs_resampling[row] = spec.logprobs is not None or bool(spec.grammar) or needs_processors
        self.named.pop(row, None)
        if spec.logprobs is not None and spec.logprob_token_ids:
            self.named[row] = torch.tensor([spec.logprob_token_ids], dtype=torch.int64).to(self._device)
        self._edits.pop(row, None)
        self.prompts.pop(row, None)
        if needs_processors:
            self._edits[start.row] = LogitsProcessors(start, self._vocab_size, self._max_len, self._device)
        if spec.prompt_logprobs is not None:
            prompt = start.token_ids[: start.num_prompt_tokens]
            self.prompts[start.row] = PromptLogprobsSpec(prompt, spec.prompt_logprobs)

    def processors_of(self, rows: IntRows) -> dict[int, LogitsProcessors]:
        """Return index in ``rows`` -> processors, for the rows that have processors."""
        if not self._edits:
            return {}
        found = ((index, self._edits.get(row)) for index, row in enumerate(rows.tolist()))
        return {index: processors for index, processors in found if processors is not None}

    def keys(self, rows: IntRows, positions: npt.NDArray[np.int64]) -> IntRows:
        """Return the noise keys [N, 2]."""
        return row_keys(self._seeds[rows], positions)

    def floats(self, rows: IntRows) -> npt.NDArray[np.float32]:
        """Return [4, N]: temperature, top_k, top_p, min_p."""
        return np.ascontiguousarray(self._floats[rows].T)

    def early_stops(self, rows: IntRows, positions: npt.NDArray[np.int64]) -> IntRows:
        """Return [N, EARLY_STOPS]: the stop ids that are not allowed at ``positions`` yet, else -1."""
        is_early = positions < self._may_stop_at[rows]
        return np.where(is_early[:, None], self._early_stops[rows], np.int32(-1))

    def draft_numbers(self, rows: IntRows) -> IntRows:
        """Return [N, DRAFT_NUMBERS]: the fields of ``DraftRowState`` for these rows, int64 numbers as two
        words."""
        bases = key_bases(self._seeds[rows]).view(np.int32).reshape(-1, 2)
        may_stop_at = self._may_stop_at[rows].view(np.int32).reshape(-1, 2)
        return np.concatenate(
            (bases, may_stop_at, self._early_stops[rows], self._floats[rows].view(np.int32)), axis=1
        )
