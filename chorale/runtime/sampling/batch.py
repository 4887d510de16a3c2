"""SamplingBatch: the sampler's input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from chorale.kernels.ops import Allowed, SamplingInputs
from chorale.runtime.sampling.logits_processors import LogitsProcessors
from chorale.runtime.sampling.row_state import RowSamplingState


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling inputs of N samples: one for each sampled row, 1 + K for a row with a draft of K tokens.

    ``state`` tells the host which work a row needs, so that the rest is skipped; the device computes with the
    tensors. ``positions`` are those of the tokens to be sampled.
    """

    state: RowSamplingState
    rows: npt.NDArray[np.int32]  # [N] device row
    positions: npt.NDArray[np.int64]  # [N]
    processors: dict[int, LogitsProcessors]  # sample -> its row's processors
    row_index: torch.Tensor  # [N] int64, the same as rows
    inputs: SamplingInputs  # with filters, though no row may have one

    def __len__(self) -> int:
        return len(self.rows)

    def with_grammars(self, allowed: Allowed | None) -> SamplingBatch:
        return replace(self, inputs=replace(self.inputs, allowed=allowed))

    def at(self, samples: npt.NDArray[np.int64], index: torch.Tensor) -> SamplingBatch:
        """Return some of the samples; ``index`` is ``samples`` [M] int64 on the device."""
        rows = self.rows[samples]
        return SamplingBatch(
            state=self.state,
            rows=rows,
            positions=self.positions[samples],
            processors=self.state.processors_of(rows),
            row_index=self.row_index[index],
            inputs=self.inputs.at(index),
        )
