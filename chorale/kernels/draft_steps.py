"""Inputs and outputs of the small kernels in steps that verify drafts and make new drafts.

Such a step has R rows of S tokens: a row's last token and up to S - 1 draft tokens, at index ``r * S + s``. N
= R * S. For a missing draft token, a row computes its first token again and writes the keys and values to a
block that is never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LAST = -1  # placeholder for the row's last token
NEW_BLOCKS = 2  # maximum new blocks of a row per group in such a step


@dataclass(frozen=True, slots=True)
class DraftRowState:
    """Device memory per row; the last row is used by dummy rows.

    ``drafts`` follow the row's last token, whose position is ``last_position``. Both are written at the end
    of a step that makes drafts, so they are valid only for rows whose newest step made drafts.
    """

    last_token: torch.Tensor  # [rows] int64
    last_position: torch.Tensor  # [rows] int64
    drafts: torch.Tensor  # [K, rows] int64
    key_bases: torch.Tensor  # [rows] int64: finish(seed + G) of ``reference/noise.py``
    may_stop_at: torch.Tensor  # [rows] int64: the first position where a stop id is allowed
    stops: torch.Tensor  # [rows, EARLY_STOPS] int32
    floats: torch.Tensor  # [rows, 4] float32: temperature, top_k, top_p, min_p
    block_tables: torch.Tensor  # [2, rows, width] int32
    block_size: int
    window: int
    dummy_block: int


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """The host's inputs for R rows."""

    rows: torch.Tensor  # [R] int32 device row
    num_computed: torch.Tensor  # [R] int32: position of the first token, unless its draft is on the device
    num_drafts: torch.Tensor  # [R] int32, at most S - 1
    token_ids: torch.Tensor  # [S, R] int32; negative: LAST or DRAFT - j
    first_new: torch.Tensor  # [R] int32: logical index of the first new block
    new_blocks: torch.Tensor  # [2, NEW_BLOCKS, R] int32 by group; -1: none


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """The inputs of the model and the sampler. ``verify_inputs`` writes them."""

    token_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    context_lens: torch.Tensor  # [N] int32
    slots: torch.Tensor  # [2, N] int64
    tables: torch.Tensor  # [2, N, width] int32, as far as layers can see
    keys: torch.Tensor  # [N, 2] int32, noise keys of the tokens to be sampled
    temperature: torch.Tensor  # [N] float32
    filters: torch.Tensor  # [N, 3] float32
    early_stops: torch.Tensor  # [N, EARLY_STOPS] int32


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of ``accept``, which also writes the rows' last tokens and positions."""

    tokens: torch.Tensor  # [N] int64: the kept samples, REJECTED for the others
    following: torch.Tensor  # [N] int64: the token after each token, for the head
    last_place: torch.Tensor  # [R] int64: index of each row's last kept sample


@dataclass(frozen=True, slots=True)
class DraftPasses:
    """The inputs of M passes of the head: positions, slots and noise.

    ``draft_passes`` writes them. The first pass only needs keys, because it reads the tokens of the target's
    step.
    """

    keys: torch.Tensor  # [M, R, 2] int32
    temperature: torch.Tensor  # [R] float32
    positions: torch.Tensor  # [M, R] int64
    context_lens: torch.Tensor  # [M, R] int32
    slots: torch.Tensor  # [M, R] int64, in blocks of the FULL group
    tables: torch.Tensor  # [R, width] int32
