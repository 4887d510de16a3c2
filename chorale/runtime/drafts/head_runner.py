"""HeadRunner: runs a draft head at the end of a step. Its first pass reads the states of all tokens of the
step, each with the next token, so that its keys and values stay in step with the target's. The state of a
row's last kept token gives the first draft token; each further pass takes one token per row. P-EAGLE and
DFlash draft all tokens of a row in one pass, with masks in place of those not known yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from chorale.kernels.draft_steps import DraftPasses, DraftRowState
from chorale.kernels.ops import AttentionMeta, Ops, Sample, SamplingInputs
from chorale.model.draft.head import DraftHead
from chorale.model.gpt_oss import AuxStates
from chorale.runtime.sizing.memory import LOGIT_ROWS


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """The tokens of a step, for the head's first pass. R rows sample."""

    aux: torch.Tensor  # [T, A * H] the target's states
    following: torch.Tensor  # [T] int64 the token after each token
    attention: AttentionMeta
    last_kept: torch.Tensor  # [R] int64 index of the last kept token among the T
    rows: torch.Tensor  # [R] int32 device row; the dummy row for rows that get no drafts


class HeadRunner:
    """Owns the head's keys and values, and the memory of its passes. Never waits for the device, so a graph
    may contain ``run``."""

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
        """``draw``: samples draft tokens. ``dtype``: the type of the target's states."""
        self._head, self._ops, self._kv, self._state, self._draw = head, ops, kv, state, draw
        self._max_len, self._dtype = max_len, dtype
        device, (passes, rows), width = kv.device, state.drafts.shape, state.block_tables.shape[2]
        self._is_parallel = head.config.kind != "eagle3"
        passes += 2 if self._is_parallel else 0  # the last token's position, and the one after the draft
        entries = rows * passes if self._is_parallel else rows
        mask = head.weights.mask
        self._mask_state = None if mask is None else head.project(mask.to(dtype))  # [1, H]

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
        self._index = torch.arange(entries, device=device)
        self._query_start = torch.arange(entries + 1, dtype=torch.int32, device=device)
        self._drawn = room(entries, dtype=torch.int64)

    @property
    def kv(self) -> torch.Tensor:
        """The head's keys and values, by layer, in the pool's blocks."""
        return self._kv

    def aux_states(self, num_tokens: int) -> AuxStates:
        """Allocate memory for the target's states of a step."""
        config = self._head.config
        states = torch.empty(num_tokens, config.aux_width, dtype=self._dtype, device=self._kv.device)
        return AuxStates(config.aux_boundaries, states)

    def run(self, read: ReadTokens, num_made: int, longest: int | None = None) -> None:
        """Read a step's tokens, and make ``num_made`` draft tokens for its rows, in ``DraftRowState``.
        ``longest``: approximate tokens of the longest context; None: the maximum length.
        """
        head, count = self._head, len(read.rows)
        if self._is_parallel:
            self._run_parallel(read, num_made if count else 0, longest or self._max_len)
            return
        x = head.run(head.project(read.aux), read.following, read.attention, self._kv)
        if not num_made or not count:
            return
        passes = self._passes_of(num_made)
        self._ops.draft_passes(read.rows, self._state, passes)
        rows, index = read.rows.long(), read.last_kept
        for number in range(num_made):
            drafts = self._state.drafts[number]
            draws = SamplingInputs(passes.keys[number, :count], passes.temperature[:count], read.rows)
            self._draw(head.logits(x, index), draws, drafts, self._drawn[:count])
            if number + 1 < num_made:
                states = head.next_states(x.index_select(0, index))
                attention = self._attention(
                    passes, range(number + 1, number + 2), count, longest or self._max_len
                )
                x = head.run(states, drafts[rows], attention, self._kv)
                index = self._index[:count]

    def _run_parallel(self, read: ReadTokens, num_made: int, longest: int) -> None:
        """``run`` in one pass. Entries of drafts are ordered by number, then by row."""
        head, count, states = self._head, len(read.rows), self._head.project(read.aux)
        if num_made:
            passes = self._passes_of(num_made + 2)
            self._ops.draft_passes(read.rows, self._state, passes)
        if head.config.kind == "dflash":
            head.read(states, read.attention, self._kv)
            if not num_made:
                return
            block = self._attention(passes, range(1, num_made + 2), count, longest)
            ends = passes.context_lens[num_made + 1, :count].repeat(num_made + 1)  # sees the whole block
            tokens = torch.full_like(block.positions, head.config.mask_token)
            # In a dry run, no kernel has written these tokens, and an id outside of the table stops the GPU.
            last = read.following.index_select(0, read.last_kept)
            tokens[:count] = last.clamp(0, head.config.vocab_size - 1)
            x = head.run_block(tokens, replace(block, context_lens=ends), self._kv)
            index = self._index[count : count * (num_made + 1)]
        else:
            tokens, attention, index = read.following, read.attention, read.last_kept
            if num_made > 1:
                assert self._mask_state is not None
                masks = self._attention(passes, range(1, num_made), count, longest)
                extra = len(masks.positions)
                states = torch.cat((states, self._mask_state.expand(extra, -1)))
                tokens = torch.cat((tokens, tokens.new_full((extra,), head.config.mask_token)))
                index = torch.cat((index, self._index[:extra] + len(read.following)))
                attention = _joined(attention, masks)
            x = head.run(states, tokens, attention, self._kv)
        if num_made:
            self._draw_all(x, index, passes, read.rows, num_made)

    def _attention(self, passes: DraftPasses, numbers: range, count: int, longest: int) -> AttentionMeta:
        """Return the metadata of the passes ``numbers`` as rows of one token each."""
        some, total = slice(numbers.start, numbers.stop), len(numbers) * count
        tables, slots = passes.tables[:count], passes.slots[some, :count].flatten()
        if len(numbers) > 1:
            tables = tables.repeat(len(numbers), 1)
        return AttentionMeta(
            positions=passes.positions[some, :count].flatten(),
            query_start=self._query_start[: total + 1],
            context_lens=passes.context_lens[some, :count].flatten(),
            block_tables=(tables, tables),
            slots=(slots, slots),
            max_query_len=1,
            max_context_len=longest,
        )

    def _draw_all(
        self, x: torch.Tensor, index: torch.Tensor, passes: DraftPasses, rows: torch.Tensor, num_made: int
    ) -> None:
        """Sample the drafts of all numbers from x at ``index``, some rows of logits at a time."""
        count, drafts = len(rows), self._state.drafts[:num_made]
        keys, temperature = passes.keys[:num_made, :count].flatten(0, 1), passes.temperature[:count]
        places = (self._query_start[:num_made, None] * drafts.shape[1] + rows).flatten()  # in flat drafts
        for first in range(0, len(index), LOGIT_ROWS):
            some = slice(first, min(first + LOGIT_ROWS, len(index)))
            draws = SamplingInputs(keys[some], temperature.repeat(num_made)[some], places[some])
            self._draw(self._head.logits(x, index[some]), draws, drafts.view(-1), self._drawn[some])

    def _passes_of(self, num_made: int) -> DraftPasses:
        whole = self._passes
        return replace(
            whole,
            keys=whole.keys[:num_made],
            positions=whole.positions[:num_made],
            context_lens=whole.context_lens[:num_made],
            slots=whole.slots[:num_made],
        )


def _joined(first: AttentionMeta, second: AttentionMeta) -> AttentionMeta:
    """Return the rows of both. The full group's tables and slots stand for both groups'."""
    table, more = first.block_tables[0], second.block_tables[0]
    tables = torch.cat((F.pad(table, (0, more.shape[1] - table.shape[1])), more))
    slots = torch.cat((first.slots[0], second.slots[0]))
    starts = second.query_start[1:] + first.query_start[-1]
    return AttentionMeta(
        positions=torch.cat((first.positions, second.positions)),
        query_start=torch.cat((first.query_start, starts)),
        context_lens=torch.cat((first.context_lens, second.context_lens)),
        block_tables=(tables, tables),
        slots=(slots, slots),
        max_query_len=first.max_query_len,
        max_context_len=max(first.max_context_len, second.max_context_len),
    )
