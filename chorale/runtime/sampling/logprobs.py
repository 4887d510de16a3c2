"""Log-probabilities of the model's distribution, before or after logits processors, temperature and filters
(``--logprobs-mode``).

Computed only for the rows that request them. They stay on the device until the step's results are fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from chorale.engine.types import TokenLogprobs

PIECE = 128  # columns; divides the vocabulary of gpt-oss


class LogprobTensors(NamedTuple):
    """M positions: the token's log-probability and rank, and K alternatives (best first) or named tokens."""

    token_ids: torch.Tensor  # [M] int64
    logprobs: torch.Tensor  # [M] float32
    ranks: torch.Tensor  # [M] int64, 1 = most likely
    top_ids: torch.Tensor  # [M, K] int64
    top_logprobs: torch.Tensor  # [M, K] float32


def gather_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    named: torch.Tensor | None = None,
    *,
    as_logits: bool = False,
) -> LogprobTensors:
    """Compute the log-probabilities of ``token_ids`` [M] int64 (all valid) in ``logits`` [M, V] float32.

    ``named`` [1, K] int64: compute those of these ids instead of the ``num_top`` best.
    ``as_logits``: return the logits themselves instead.
    """
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    total = torch.zeros_like(chosen) if as_logits else logsumexp(logits)
    if named is None:
        top, top_ids = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    else:
        top_ids = named.expand(len(logits), -1)
        top = logits.gather(1, top_ids)
    return LogprobTensors(
        token_ids=token_ids,
        logprobs=(chosen - total).squeeze(1),
        ranks=(logits > chosen).sum(-1) + 1,
        top_ids=top_ids,
        top_logprobs=top - total,
    )


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """Return [M, 1] for [M, V]. Sums short pieces first, so that on a CPU the order of additions depends
    neither on the number of rows nor on that of threads, as it does in ``torch.logsumexp``."""
    best = logits.amax(-1, keepdim=True)
    best = best.masked_fill_(best.isinf(), 0.0)
    weights = F.pad((logits - best).exp_(), (0, -logits.shape[-1] % PIECE))
    total = weights.view(len(logits), -1, PIECE).sum(-1).sum(-1, keepdim=True)
    return total.log_() + best


def shared_logprobs(
    own: range,
    all_gather: Callable[[torch.Tensor], torch.Tensor],
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    named: torch.Tensor | None = None,
    *,
    as_logits: bool = False,
) -> LogprobTensors:
    """``gather_logprobs`` over several ranks: ``logits`` [M, V of this rank] are those of the rank's ids.

    The ranks exchange twice: their best logits, sum and chosen logit; then how many logits are above the
    chosen one.
    """
    chosen = _own_logits(own, logits, token_ids.unsqueeze(1))
    total = logits.logsumexp(-1, keepdim=True)
    if named is None:
        top, columns = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
        missing = (0, num_top - top.shape[-1])
        top, ids = F.pad(top, missing, value=float("-inf")), F.pad(columns + own.start, missing)
        sent = torch.cat((chosen, total, top, ids.float()), dim=1)
    else:
        top_ids = named.expand(len(logits), -1)
        sent = torch.cat((chosen, total, _own_logits(own, logits, top_ids)), dim=1)
    parts = all_gather(sent)  # [size, M, 2 + 2 K], or 2 + K if named
    chosen, total = parts[:, :, :1].amax(0), parts[:, :, 1:2].logsumexp(0)
    total = torch.zeros_like(total) if as_logits else total
    above = all_gather((logits > chosen).sum(-1).float()).sum(0)  # exact
    if named is None:
        values = parts[:, :, 2 : 2 + num_top].movedim(0, 1).flatten(1)
        top, best = values.topk(num_top, dim=-1)
        top_ids = parts[:, :, 2 + num_top :].movedim(0, 1).flatten(1).gather(1, best).long()
    else:
        top = parts[:, :, 2:].amax(0)
    return LogprobTensors(
        token_ids=token_ids,
        logprobs=(chosen - total).squeeze(1),
        ranks=above.long() + 1,
        top_ids=top_ids,
        top_logprobs=top - total,
    )


def _own_logits(own: range, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of ``token_ids`` [M, K], -inf for those of other ranks."""
    local = token_ids - own.start
    is_other = (local < 0) | (local >= len(own))
    return logits.gather(1, local.masked_fill(is_other, 0)).masked_fill(is_other, float("-inf"))


def to_records(arrays: Sequence[npt.NDArray[np.generic]]) -> list[TokenLogprobs]:
    """Returns one record for each position. ``arrays``: the fetched tensors of ``LogprobTensors``."""
    columns = (array.tolist() for array in arrays)
    return [TokenLogprobs(*position) for position in zip(*columns, strict=True)]
