"""Log-probabilities of the model's distribution before logits processors, filters and temperature (vLLM's
default).

Computed only for the rows that request them. They stay on the device until the step's results are fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from chorale.engine.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """M positions: the token's own log-probability and rank, and K alternatives, best first."""

    token_ids: torch.Tensor  # [M] int64
    logprobs: torch.Tensor  # [M] float32
    ranks: torch.Tensor  # [M] int64, 1 = most likely
    top_ids: torch.Tensor  # [M, K] int64
    top_logprobs: torch.Tensor  # [M, K] float32

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """For ``logits`` [M, V] float32 and ``token_ids`` [M] int64 (all valid)."""
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    total = logits.logsumexp(-1, keepdim=True)
    top, top_ids = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    return LogprobTensors(
        token_ids=token_ids,
        logprobs=(chosen - total).squeeze(1),
        ranks=(logits > chosen).sum(-1) + 1,
        top_ids=top_ids,
        top_logprobs=top - total,
    )


def gather_in_parts(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, rows_at_once: int
) -> LogprobTensors:
    """The same, a few rows at once: the intermediate [M, V] would be large for a whole prompt."""
    parts = [
        gather_logprobs(some, ids, num_top)
        for some, ids in zip(logits.split(rows_at_once), token_ids.split(rows_at_once), strict=True)
    ]
    columns = zip(*(part.tensors() for part in parts), strict=True)
    return LogprobTensors(*(torch.cat(column) for column in columns))


def to_records(arrays: Sequence[npt.NDArray[np.generic]], num_tops: Sequence[int]) -> list[TokenLogprobs]:
    """The fetched tensors of ``LogprobTensors``; position ``i`` keeps ``num_tops[i]`` alternatives."""
    token_ids, logprobs, ranks, top_ids, top_logprobs = (array.tolist() for array in arrays)
    return [
        TokenLogprobs(token_ids[i], logprobs[i], ranks[i], top_ids[i][:num], top_logprobs[i][:num])
        for i, num in enumerate(num_tops)
    ]
