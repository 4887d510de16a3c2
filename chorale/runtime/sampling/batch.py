"""SamplingBatch: the sampler's input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from chorale.runtime.sampling.logits_processors import LogitsProcessors


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling inputs of N samples: one for each sampled row, 1 + K for a row with a draft of K tokens.

    Host arrays tell which work a row needs, so that the rest is skipped; the device computes with the
    tensors. ``positions`` are those of the tokens to be sampled.
    """

    rows: npt.NDArray[np.int32]  # [N] device row
    positions: npt.NDArray[np.int64]  # [N]
    greedy: npt.NDArray[np.bool_]  # [N]
    filtered: npt.NDArray[np.bool_]  # [N, 3] uses top_k, top_p, min_p
    top_ks: npt.NDArray[np.int32]  # [N]; 0 when off
    num_logprobs: npt.NDArray[np.int32]  # [N] number of alternatives; -1: no log-probabilities
    processors: dict[int, LogitsProcessors]  # sample -> its row's processors
    row_index: torch.Tensor  # [N] int64, the same as rows
    keys: torch.Tensor  # [N, 2] int32, see noise.py
    temperature: torch.Tensor  # [N] float32; 0 for greedy rows
    top_k: torch.Tensor  # [N] float32; the vocabulary's size when off
    top_p: torch.Tensor  # [N] float32; 1 when off
    min_p: torch.Tensor  # [N] float32; 0 when off
    early_stops: torch.Tensor  # [N, EARLY_STOPS] int32, see SamplingInputs

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, samples: npt.NDArray[np.int64], index: torch.Tensor) -> SamplingBatch:
        """Return some of the samples; ``index`` is ``samples`` [M] int64 on the device."""
        return SamplingBatch(
            rows=self.rows[samples],
            positions=self.positions[samples],
            greedy=self.greedy[samples],
            filtered=self.filtered[samples],
            top_ks=self.top_ks[samples],
            num_logprobs=self.num_logprobs[samples],
            processors={
                new: self.processors[old]
                for new, old in enumerate(samples.tolist())
                if old in self.processors
            },
            row_index=self.row_index[index],
            keys=self.keys[index],
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            early_stops=self.early_stops[index],
        )
