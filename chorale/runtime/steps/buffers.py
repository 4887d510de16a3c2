"""Buffers: device state per row that lasts between steps, and the conversion of a plan into a batch.

Rows persist: block tables are appended to, and the last sampled token stays on the device (a plan refers to
it by -1). A step copies two small int32 arrays to the device. Rows of the batch are the plan's entries. There
is one row more than sequences can use: ``spare_row``, for a graph's dummy rows (``decode_graphs.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from chorale.engine.types import DRAFT, EARLY_STOPS, CacheGroup, EngineLimits, StepPlan
from chorale.kernels.draft_steps import LAST, DraftRowState
from chorale.kernels.ops import AttentionMeta, ForwardBatch, SamplingInputs
from chorale.runtime.device import Device
from chorale.runtime.sampling.batch import SamplingBatch
from chorale.runtime.sampling.row_state import RowSamplingState
from chorale.runtime.steps.batch import DraftTensors, PromptLogprobs, StepBatch, sample_layout

Int32 = npt.NDArray[np.int32]


class Buffers:
    """Owns block tables, last tokens and sampling parameters. ``fill`` is called once per step."""

    def __init__(self, device: Device, limits: EngineLimits) -> None:
        target, num_rows, max_len = device.torch_device, limits.max_num_seqs, limits.max_model_len
        num_blocks = -(-max_len // limits.block_size) + 1
        self._device, self.block_size, self.spare_row = device, limits.block_size, num_rows
        self.rows = RowSamplingState(num_rows, limits.vocab_size, max_len, target)
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=target)
        self.draft_state: DraftRowState | None = None  # set once, if there is a draft head
        self._nothing = torch.zeros(0, dtype=torch.int32, device=target)
        self.block_tables = torch.zeros(
            len(CacheGroup), num_rows + 1, num_blocks, dtype=torch.int32, device=target
        )

    def start_rows(self, plan: StepPlan) -> None:
        """Set up the rows that start. Call before anything else for the plan."""
        for start in plan.starts:
            self.rows.start(start)

    def append_blocks(self, plan: StepPlan) -> None:
        """Only append the blocks that rows gained; otherwise ``lay_out`` does it."""
        self._append(*self._upload((plan.appends,)).take(1))

    def sampling_of(self, rows: Int32, positions: npt.NDArray[np.int64]) -> SamplingBatch:
        """Make the SamplingBatch for the tokens at ``positions`` of some rows."""
        return self._sampling_batch(rows, positions, self._upload(self._sampling_arrays(rows, positions)))

    def fill(self, plan: StepPlan) -> ForwardBatch:
        """Append the blocks that rows gained, and lay out the step."""
        packed, lengths = self.pack(plan, plan.appends)
        longest = int((plan.num_computed + plan.num_new).max())
        num_blocks = -(-longest // self.block_size)
        return self.lay_out(packed, lengths, num_blocks, int(plan.num_new.max()), longest)

    def pack(self, plan: StepPlan, appends: Int32) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Upload the input of ``lay_out``. Returns it with the lengths of its parts.

        ``appends``: the plan's, or a replacement.
        """
        num_new, query_start = plan.num_new, query_starts(plan)
        shift = np.repeat(plan.num_computed - query_start[:-1], num_new)
        positions = np.arange(plan.num_tokens, dtype=np.int32) + shift
        token_rows, context_lens = np.repeat(plan.rows, num_new), plan.num_computed + num_new
        arrays = (appends, plan.token_ids, positions, token_rows, query_start, context_lens, plan.rows)
        packed = self._device.upload(np.concatenate(arrays, dtype=np.int32))
        return packed, tuple(len(array) for array in arrays)

    def sampling_step(self, plan: StepPlan) -> StepBatch:
        """Make the part of the batch that is used after the forward pass, while the device computes."""
        query_start = query_starts(plan)
        layout = sample_layout(plan, query_start)
        entries, num_before = layout.entries, plan.num_new
        if plan.num_drafts is not None:
            num_before = num_before - plan.num_drafts
        rows, shift = plan.rows[entries], num_before[entries] + layout.offsets
        positions = (plan.num_computed[entries] + shift).astype(np.int64)
        drafts = () if layout.drafts is None else (layout.drafts, layout.firsts)
        last = query_start[entries] + shift - 1
        parts = self._upload((last, *drafts, *self._sampling_arrays(rows, positions)))
        index, *rest = (part.long() for part in parts.take(1 + len(drafts)))
        return StepBatch(
            logits_index=index,
            sampling=self._sampling_batch(rows, positions, parts),
            layout=layout,
            drafts=DraftTensors(*rest) if rest else None,
            prompt=tuple(self._prompt_logprobs(plan, query_start)),
        )

    def lay_out(
        self,
        packed: torch.Tensor,
        lengths: Sequence[int],
        num_blocks: int,
        max_query_len: int,
        max_context_len: int,
    ) -> ForwardBatch:
        """Append blocks and make the model's input. Runs on the device only, so a graph may contain it."""
        parts = _Parts(packed, lengths)
        appends, tokens, positions, token_rows, query_start, context_lens, rows = parts.take(7)
        self._append(appends)
        positions, token_rows = positions.long(), token_rows.long()
        token_ids = torch.where(tokens < 0, self.last_token[token_rows], tokens.long())
        if self.draft_state is not None:
            # A row whose draft is on the device begins at the position of its last token there; its plan has
            # only an upper bound.
            state, is_draft = self.draft_state, tokens <= DRAFT
            drafts = state.drafts[(DRAFT - tokens).clamp(0, len(state.drafts) - 1).long(), token_rows]
            token_ids = torch.where(is_draft, drafts, token_ids)
            is_first = (tokens == LAST) & torch.nn.functional.pad(is_draft[1:], (0, 1))
            on_device = is_draft | is_first
            positions = torch.where(on_device, state.last_position[token_rows] + LAST - tokens, positions)
            ends = (query_start[1:] - 1).long()
            ends_on_device = on_device[ends] & (token_rows[ends] == rows)
            context_lens = torch.where(ends_on_device, positions[ends].int() + 1, context_lens)
        index, offset = positions // self.block_size, positions % self.block_size
        slots = self.block_tables[:, token_rows, index].long() * self.block_size + offset  # [2, T]
        tables = self.block_tables[:, :, :num_blocks].index_select(1, rows)  # [2, R, blocks]
        return ForwardBatch(
            token_ids=token_ids,
            logits_index=token_ids[:0],  # unused: the sampling step has its own index
            attention=AttentionMeta(
                positions=positions,
                query_start=query_start,
                context_lens=context_lens,
                block_tables=(tables[CacheGroup.FULL], tables[CacheGroup.WINDOW]),
                slots=(slots[CacheGroup.FULL], slots[CacheGroup.WINDOW]),
                max_query_len=max_query_len,
                max_context_len=max_context_len,
            ),
        )

    def _append(self, appends: torch.Tensor) -> None:
        if len(appends):
            group, row, index, block = appends.view(4, -1)
            self.block_tables.index_put_((group.long(), row.long(), index.long()), block)

    def _upload(self, arrays: Sequence[Int32]) -> _Parts:
        host = np.concatenate(arrays, dtype=np.int32)
        # A chunk before the end of a prompt samples nothing, and pinned memory cannot have size 0.
        packed = self._device.upload(host) if len(host) else self._nothing
        return _Parts(packed, [len(array) for array in arrays])

    def _sampling_arrays(self, rows: Int32, positions: npt.NDArray[np.int64]) -> tuple[Int32, ...]:
        """Return the parameters of ``_sampling_batch``."""
        keys, floats = self.rows.keys(rows, positions), self.rows.floats(rows).view(np.int32)
        return rows, keys.ravel(), floats.ravel(), self.rows.early_stops(rows, positions).ravel()

    def _sampling_batch(
        self, sampled: Int32, positions: npt.NDArray[np.int64], parts: _Parts
    ) -> SamplingBatch:
        rows, keys, floats, early_stops = parts.take(4)
        numbers = floats.view(torch.float32).view(4, -1)
        return SamplingBatch(
            state=self.rows,
            rows=sampled,
            positions=positions,
            processors=self.rows.processors_of(sampled),
            row_index=rows.long(),
            inputs=SamplingInputs(
                keys.view(-1, 2),
                numbers[0],
                rows,
                numbers[1:].t(),
                early_stops=early_stops.view(-1, EARLY_STOPS),
            ),
        )

    def _prompt_logprobs(self, plan: StepPlan, query_start: Int32) -> list[PromptLogprobs]:
        """Return the requested prompt log-probabilities. The last prompt token predicts output and has no
        target."""
        requests: list[PromptLogprobs] = []
        if not plan.prompt_logprob_rows:
            return requests
        for entry, row in enumerate(plan.rows.tolist()):
            if row not in plan.prompt_logprob_rows:
                continue
            spec = self.rows.prompts[row]
            start = int(plan.num_computed[entry])
            targets = spec.token_ids[start + 1 : start + 1 + int(plan.num_new[entry])]
            if len(targets):
                device_targets = self._device.upload(np.ascontiguousarray(targets, np.int32)).long()
                first = int(query_start[entry])
                requests.append(PromptLogprobs(entry, first, device_targets, spec.num_top))
        return requests


def query_starts(plan: StepPlan) -> Int32:
    """Return [R + 1]: index of each entry's first token in the step."""
    starts: Int32 = np.zeros(len(plan.num_new) + 1, np.int32)
    np.cumsum(plan.num_new, out=starts[1:])
    return starts


class _Parts:
    """Several arrays uploaded as one; ``take`` returns them in order."""

    __slots__ = ("_tensors",)

    def __init__(self, packed: torch.Tensor, lengths: Sequence[int]) -> None:
        self._tensors = iter(packed.split(list(lengths)))

    def take(self, count: int) -> list[torch.Tensor]:
        return [next(self._tensors) for _ in range(count)]
