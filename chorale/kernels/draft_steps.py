"""The small kernels of steps that verify drafts and make new ones: their inputs, and what they write.

Such a step has R rows of S places: a row's last token and up to S - 1 draft tokens, place ``r * S + s``.
N = R * S. A row with a shorter draft computes its first place again where a draft token is missing, and
writes the keys and values of that place to a block that nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LAST = -1  # in place of a token id: the row's last token
NEW_BLOCKS = 2  # of each group, that a row may gain in such a step


@dataclass(frozen=True, slots=True)
class DraftRowState:
    """Memory by device row; the last row is that of dummies.

    ``drafts`` continue the row's last token, whose position is ``last_position``. Both are written when a
    step ends that makes drafts, so they hold for a row whose newest step made some.
    """

    last_token: torch.Tensor  # [rows] int64
    last_position: torch.Tensor  # [rows] int64
    drafts: torch.Tensor  # [K, rows] int64
    key_bases: torch.Tensor  # [rows] int64: finish(seed + G) of ``reference/noise.py``
    may_stop_at: torch.Tensor  # [rows] int64: the first position that may be a stop id
    stops: torch.Tensor  # [rows, EARLY_STOPS] int32
    floats: torch.Tensor  # [rows, 4] float32: temperature, top_k, top_p, min_p
    block_tables: torch.Tensor  # [2, rows, width] int32
    block_size: int
    window: int
    dummy_block: int


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """The host's numbers for R rows."""

    rows: torch.Tensor  # [R] int32 device row
    num_computed: torch.Tensor  # [R] int32: position of the first place, unless its draft is the device's
    num_drafts: torch.Tensor  # [R] int32, at most S - 1
    token_ids: torch.Tensor  # [S, R] int32; negative: LAST or DRAFT - j
    first_new: torch.Tensor  # [R] int32: logical index of the first new block
    new_blocks: torch.Tensor  # [2, NEW_BLOCKS, R] int32 by group; -1: none


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """The inputs of the model and the sampler, which ``verify_inputs`` writes."""

    token_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    context_lens: torch.Tensor  # [N] int32
    slots: torch.Tensor  # [2, N] int64
    tables: torch.Tensor  # [2, N, width] int32, as far as the place's layers can see
    keys: torch.Tensor  # [N, 2] int32, of the token to be sampled
    temperature: torch.Tensor  # [N] float32
    filters: torch.Tensor  # [N, 3] float32
    early_stops: torch.Tensor  # [N, EARLY_STOPS] int32


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of ``accept``, beside the rows' last tokens and positions."""

    tokens: torch.Tensor  # [N] int64: the samples that are kept, REJECTED for the others
    following: torch.Tensor  # [N] int64: the token after each place, for the head
    last_place: torch.Tensor  # [R] int64: the place of the last sample kept


@dataclass(frozen=True, slots=True)
class DraftPasses:
    """The inputs of M passes of the head, which ``draft_passes`` writes: places and noise.

    The first pass needs its keys only: it follows the target's own step.
    """

    keys: torch.Tensor  # [M, R, 2] int32
    temperature: torch.Tensor  # [R] float32
    positions: torch.Tensor  # [M, R] int64
    context_lens: torch.Tensor  # [M, R] int32
    slots: torch.Tensor  # [M, R] int64, in blocks of the FULL group
    tables: torch.Tensor  # [R, width] int32
