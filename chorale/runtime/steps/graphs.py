"""StepGraphs: what captured steps of every kind have: graphs, static input, and host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chorale.engine.types import IntArray, StepPlan
from chorale.kernels.draft_steps import VerifyBatch
from chorale.kernels.ops import AttentionMeta, DecodeState, ForwardBatch
from chorale.model.gpt_oss import GptOss
from chorale.runtime.adapters import AdapterStore
from chorale.runtime.device import Device
from chorale.runtime.sampling.sampler import Sampler
from chorale.runtime.steps.buffers import Buffers


@dataclass(frozen=True, slots=True)
class StepParts:
    """What steps of every kind use."""

    device: Device
    model: GptOss
    kv: list[torch.Tensor]  # the last block of each belongs to dummy rows
    buffers: Buffers
    sampler: Sampler
    adapters: AdapterStore | None  # required for rows with adapters


@dataclass(slots=True)
class StagingBuffers:
    """Host memory of one step in flight, pinned on a GPU."""

    inputs: torch.Tensor  # int32
    tokens: torch.Tensor  # int64


class StepGraphs:
    """Owns the graphs of one kind of step by their sizes, the input that they read, and staging buffers.

    ``device.capture`` makes the graphs; a device without graphs may run the steps themselves.
    """

    def __init__(self, parts: StepParts, num_inputs: int, num_tokens: int = 0) -> None:
        """``num_inputs``: int32 of the largest step; ``num_tokens``: its samples."""
        self._device, self._model, self._kv = parts.device, parts.model, parts.kv
        self._buffers, self._sampler, self._adapters = parts.buffers, parts.sampler, parts.adapters
        self._num_tokens = num_tokens
        self._inputs = torch.zeros(num_inputs, dtype=torch.int32, device=parts.device.torch_device)
        self._graphs: dict[tuple[int, ...], Callable[[], None]] = {}
        self._free: list[StagingBuffers] = []

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def graph(self, *key: int) -> Callable[[], None]:
        """Return the graph of a size (the arguments of ``_step``), capturing it on first use."""
        found = self._graphs.get(key)
        if found is None:
            self._fill_dummies(*key)  # capturing runs the step, which must not touch real rows
            found = self._graphs[key] = self._device.capture(self._step(*key))
        return found

    def _fill_dummies(self, *key: Any, **_: Any) -> None:
        """Fill the input of a size with dummy rows."""
        raise NotImplementedError

    def _step(self, *key: Any, **_: Any) -> Callable[[], None]:
        """Return the step that a graph contains. It uses static memory only."""
        raise NotImplementedError

    def _pack(self, plan: StepPlan, columns: IntArray) -> bool:
        """Fill the columns of a step, with one column for each of its rows. Returns False if new blocks do
        not fit into them: then the blocks must be appended before."""
        raise NotImplementedError

    def _replay(self, graph: Callable[[], None], plan: StepPlan, height: int, width: int) -> StagingBuffers:
        """Run a graph whose input are columns [``height``, ``width``]."""
        if self._free:
            staging = self._free.pop()
        else:
            inputs = self._device.host_memory(len(self._inputs), torch.int32)
            staging = StagingBuffers(inputs, self._device.host_memory(self._num_tokens, torch.int64))
        columns = staging.inputs[: height * width]
        if not self._pack(plan, columns.numpy().reshape(height, width)):
            self._buffers.append_blocks(plan)
        self._inputs[: height * width].copy_(columns, non_blocking=True)
        graph()
        return staging

    def _download(self, staging: StagingBuffers, tokens: torch.Tensor) -> Callable[[], npt.NDArray[np.int64]]:
        """Enqueue the download of ``tokens`` [N]. Returns a function that waits for them; call it once."""
        found = staging.tokens[: len(tokens)]
        found.copy_(tokens, non_blocking=True)
        wait = self._device.mark()

        def finish() -> npt.NDArray[np.int64]:
            wait()
            copy: npt.NDArray[np.int64] = found.numpy().copy()
            self._free.append(staging)  # the device has finished with it
            return copy

        return finish


def entries_of_appends(plan: StepPlan) -> IntArray:
    """Return the entry of each append's row in the plan, -1 if the row is not in it."""
    row = plan.append_columns[1]
    entry: IntArray = np.full(1 + max(plan.rows.max(), row.max()), -1, np.int32)
    entry[plan.rows] = np.arange(len(plan.rows), dtype=np.int32)
    found: IntArray = entry[row]
    return found


def forward_batch(
    written: DecodeState | VerifyBatch, index: torch.Tensor, query_start: torch.Tensor, longest: int
) -> ForwardBatch:
    """Return the model's input in static memory: one token with its own context for each of ``index`` [N].

    ``query_start`` [N + 1 or more]: 0, 1, 2, ...; ``longest``: tokens of the longest context.
    """
    count = len(index)
    return ForwardBatch(
        token_ids=written.token_ids[:count],
        logits_index=index,
        attention=AttentionMeta(
            positions=written.positions[:count],
            query_start=query_start[: count + 1],
            context_lens=written.context_lens[:count],
            block_tables=(written.tables[0, :count], written.tables[1, :count]),
            slots=(written.slots[0, :count], written.slots[1, :count]),
            max_query_len=1,
            max_context_len=longest,
        ),
    )
