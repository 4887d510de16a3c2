"""HeadRunner: a draft head at the end of a step.

Its first pass reads the states of all tokens of the step, with the token after each, so that its keys and
values follow the target's. The state of a row's last kept token gives the first draft token; each further
pass takes one token a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chorale.kernels.draft_steps import DraftPasses, DraftRowState
from chorale.kernels.ops import AttentionMeta, Ops, Sample, SamplingInputs
from chorale.model.draft.head import DraftHead
from chorale.model.gpt_oss import AuxStates


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """The tokens of a step, for the head's first pass. R rows sample."""

    aux: torch.Tensor  # [T, A * H] the target's states
    following: torch.Tensor  # [T] int64 the token after each
    attention: AttentionMeta
    last_place: torch.Tensor  # [R] int64 of the T: the last one kept
    rows: torch.Tensor  # [R] int32 device row; the dummies' for rows that get no drafts


class HeadRunner:
    """Owns the head's keys and values, and the memory of its passes. Contains nothing that waits for the
    device, so a graph may contain ``run``."""

    def __init__(
        self,
        head: DraftHead,
        ops: Ops,
        kv: torch.Tensor,
        state: DraftRowState,
        draw: Sample,
        *,
        max_len: int,
        dtype: torch.dtype,
    ) -> None:
        """``draw``: samples draft tokens. ``dtype``: of the target's states."""
        self._head, self._ops, self._kv, self._state, self._draw = head, ops, kv, state, draw
        self._max_len, self._dtype = max_len, dtype
        device, (passes, rows), width = kv.device, state.drafts.shape, state.block_tables.shape[2]

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._passes = DraftPasses(
            keys=room(passes, rows, 2),
            temperature=room(rows, dtype=torch.float32),
            positions=room(passes, rows, dtype=torch.int64),
            context_lens=room(passes, rows),
            slots=room(passes, rows, dtype=torch.int64),
            tables=room(rows, width),
        )
        self._index = torch.arange(rows, device=device)
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._drawn = room(rows, dtype=torch.int64)

    @property
    def kv(self) -> torch.Tensor:
        """Its keys and values, in the pool's blocks."""
        return self._kv

    def aux_states(self, num_tokens: int) -> AuxStates:
        """Return room for the target's states of a step."""
        config = self._head.config
        states = torch.empty(num_tokens, config.aux_width, dtype=self._dtype, device=self._kv.device)
        return AuxStates(config.aux_boundaries, states)

    def run(self, read: ReadTokens, num_made: int, longest: int | None = None) -> None:
        """Read a step's tokens, and make ``num_made`` draft tokens for its rows, in ``DraftRowState``.

        ``longest``: tokens of the longest context, about; None: of the longest sequence.
        """
        head, count = self._head, len(read.rows)
        x = head.run(head.project(read.aux), read.following, read.attention, self._kv)
        if not num_made or not count:
            return
        passes = self._passes_of(num_made)
        self._ops.draft_passes(read.rows, self._state, passes)
        rows, index = read.rows.long(), read.last_place
        for number in range(num_made):
            drafts = self._state.drafts[number]
            draws = SamplingInputs(passes.keys[number, :count], passes.temperature[:count], read.rows)
            self._draw(head.logits(x, index), draws, drafts, self._drawn[:count])
            if number + 1 < num_made:
                states = head.next_states(x.index_select(0, index))
                x = head.run(
                    states,
                    drafts[rows],
                    self._attention(passes, number + 1, count, longest or self._max_len),
                    self._kv,
                )
                index = self._index[:count]

    def _passes_of(self, num_made: int) -> DraftPasses:
        whole = self._passes
        return DraftPasses(
            keys=whole.keys[:num_made],
            temperature=whole.temperature,
            positions=whole.positions[:num_made],
            context_lens=whole.context_lens[:num_made],
            slots=whole.slots[:num_made],
            tables=whole.tables,
        )

    def _attention(self, passes: DraftPasses, number: int, count: int, longest: int) -> AttentionMeta:
        tables, slots = passes.tables[:count], passes.slots[number, :count]
        return AttentionMeta(
            positions=passes.positions[number, :count],
            query_start=self._query_start[: count + 1],
            context_lens=passes.context_lens[number, :count],
            block_tables=(tables, tables),
            slots=(slots, slots),
            max_query_len=1,
            max_context_len=longest,
        )
