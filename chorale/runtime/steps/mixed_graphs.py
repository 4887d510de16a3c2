"""Forward passes of small mixed steps in static memory, as graphs where the device supports them.

The device runs a step of a few hundred prompt tokens faster than the host can launch it kernel by kernel.
Such a plan is padded to a capture size: a dummy row computes the missing tokens, further dummy rows compute
none. The host's numbers are copied in one transfer; the graph derives the model's inputs from them (tokens
that never left the device, slots, tables), as in a decode step. Sampling is not in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from chorale.engine.types import IntArray, StepPlan
from chorale.kernels.adapters import NONE
from chorale.model.gpt_oss import AuxStates
from chorale.runtime.sizing.graph_sizes import MIXED_ROWS, MIXED_TOKENS, pick
from chorale.runtime.steps.graphs import StepGraphs, StepParts

TOKEN_ROWS = 3  # index of the part of ``Buffers.lay_out``'s input that has the row of each token


def pad_plan(plan: StepPlan, num_tokens: int, num_rows: int, spare_row: int) -> StepPlan:
    """Append dummy rows to a plan. The first computes the tokens missing from ``num_tokens``."""
    missing = num_rows - len(plan.rows)
    new = np.zeros(missing, np.int32)
    new[0] = num_tokens - plan.num_tokens
    return replace(
        plan,
        rows=_extended(plan.rows, np.full(missing, spare_row, np.int32)),
        num_computed=_extended(plan.num_computed, np.zeros(missing, np.int32)),
        num_new=_extended(plan.num_new, new),
        samples=np.concatenate((plan.samples, np.zeros(missing, np.bool_))),
        token_ids=_extended(plan.token_ids, np.zeros(new[0], np.int32)),
        num_drafts=None,  # sampling uses the plan itself
    )


def _extended(array: IntArray, more: IntArray) -> IntArray:
    return np.concatenate((array, more), dtype=np.int32)


def dummy_plan(num_tokens: int, spare_row: int) -> StepPlan:
    """Make a plan of one dummy row that computes ``num_tokens`` and samples none, to warm up a size."""
    none = np.zeros(0, np.int32)
    empty = StepPlan(-1, (), none, none, none, np.zeros(0, np.bool_), none, none)
    return pad_plan(empty, num_tokens, 1, spare_row)


class MixedGraphRunner(StepGraphs):
    """Runs the forward passes of mixed steps."""

    def __init__(
        self, parts: StepParts, longest: int, aux_states: Callable[[int], AuxStates] | None = None
    ) -> None:
        """``longest``: tokens of the longest sequence. No larger step is captured, because a dummy row may
        have to compute all of it; 0: no captures. ``aux_states`` allocates the head's inputs for a number of
        tokens.
        """
        self.sizes = tuple(size for size in MIXED_TOKENS if size <= longest)
        tokens, block_size = max(self.sizes, default=0), parts.buffers.block_size
        super().__init__(parts, sum(_lengths(tokens, MIXED_ROWS[-1], block_size)))
        self._longest, self._dummy_block = longest, parts.kv[0].shape[0] - 1
        parts.buffers.block_tables[:, parts.buffers.spare_row] = self._dummy_block
        width = parts.model.config.hidden_size
        self._hidden = torch.zeros(tokens, width, device=parts.device.torch_device)
        # Inputs of the draft head, from the step that ran last.
        self.aux = None if aux_states is None else aux_states(tokens)

    def padded(self, plan: StepPlan) -> StepPlan | None:
        """Return the plan padded to a capture size, or None if the plan is too large."""
        if not self.sizes or plan.num_tokens > self.sizes[-1] or len(plan.rows) >= MIXED_ROWS[-1]:
            return None
        tokens, rows = pick(self.sizes, plan.num_tokens), pick(MIXED_ROWS, len(plan.rows) + 1)
        return pad_plan(plan, tokens, rows, self._buffers.spare_row)

    def hidden(self, plan: StepPlan, reach: int = NONE) -> torch.Tensor:
        """Return the hidden states [T, H] of a plan that ``padded`` returned; valid until the next call.
        ``reach``: what the adapters of its rows change."""
        tokens, rows = plan.num_tokens, len(plan.rows)
        replay = self.graph(tokens, rows, reach)
        self._fill(plan)
        replay()
        return self._hidden[:tokens]

    def _fill_dummies(self, tokens: int, rows: int, *_: int) -> None:
        spare = self._buffers.spare_row
        self._fill(pad_plan(dummy_plan(tokens, spare), tokens, rows, spare))

    def _fill(self, plan: StepPlan) -> None:
        columns = plan.append_columns
        room = num_appends(plan.num_tokens, len(plan.rows), self._buffers.block_size)
        if columns.shape[1] > room:  # a long prefix hit
            self._buffers.append_blocks(plan)
            columns = columns[:, :0]
        # Further entries give the dummy row the block that it already has.
        dummy = np.array([[0], [self._buffers.spare_row], [0], [self._dummy_block]], np.int32)
        padding = np.repeat(dummy, room - columns.shape[1], axis=1)
        packed, _ = self._buffers.pack(plan, np.concatenate((columns, padding), axis=1).ravel())
        self._inputs[: len(packed)].copy_(packed)

    def _step(self, tokens: int, rows: int, reach: int) -> Callable[[], None]:
        lengths = _lengths(tokens, rows, self._buffers.block_size)
        packed, num_blocks = self._inputs[: sum(lengths)], self._buffers.block_tables.shape[2]

        aux = None if self.aux is None else self.aux.first(tokens)

        def step() -> None:
            batch = self._buffers.lay_out(packed, lengths, num_blocks, tokens, self._longest)
            if self._adapters is not None:
                rows_of_tokens = packed.split(lengths)[TOKEN_ROWS]
                batch = replace(batch, adapters=self._adapters.of_rows(rows_of_tokens, reach))
            self._hidden[:tokens].copy_(self._model.hidden(batch, self._kv, aux))

        return step


def num_appends(tokens: int, rows: int, block_size: int) -> int:
    """Return the maximum number of appends: the tokens' blocks plus one per row, in both groups."""
    return 2 * (tokens // block_size + 2 * rows)


def _lengths(tokens: int, rows: int, block_size: int) -> tuple[int, ...]:
    """Return the lengths of the parts of ``Buffers.lay_out``."""
    return (4 * num_appends(tokens, rows, block_size), tokens, tokens, tokens, rows + 1, rows, rows)
