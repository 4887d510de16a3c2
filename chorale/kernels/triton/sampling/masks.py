"""Masks of tokens that a row cannot have, for kernels: forbidden ids, grammars, early stops."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.engine.types import EARLY_STOPS
from chorale.kernels.ops import SamplingInputs

# Arguments that may start at any offset of a step's numbers, and their strides.
COLUMNS = ["temperature_ptr", "filters_ptr", "index_ptr", "stops_ptr"]
STRIDES = ["stops_stride", "stop_stride"]


@triton.jit
def is_out(
    forbidden_ptr, index_ptr, octets_ptr, octets_stride, stops_ptr, stops_stride, stop_stride,
    row, tokens, V, MASKED: tl.constexpr, STOPS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Return which of some tokens a row cannot have: forbidden for all rows, by its grammar, or before its
    ``min_tokens``. FIRST: the token id of column 0."""
    inside = tokens < V
    out = tl.load(forbidden_ptr + tokens, mask=inside, other=1) != 0
    if MASKED:
        index = tl.load(index_ptr + row).to(tl.int64)
        places = octets_ptr + tl.maximum(index, 0) * octets_stride + tokens // 8
        octets = tl.load(places, mask=inside, other=0).to(tl.int32)
        out |= (((octets >> (tokens % 8)) & 1) == 0) & (index >= 0)
    if STOPS > 0:
        stops_ptr += row * stops_stride
        if tl.load(stops_ptr) >= 0:
            for n in tl.static_range(STOPS):
                out |= tokens + FIRST == tl.load(stops_ptr + n * stop_stride)
    return out


@triton.jit
def load_scores(
    logits_ptr, forbidden_ptr, index_ptr, octets_ptr, octets_stride, stops_ptr, stops_stride, stop_stride,
    row, tokens, V, temperature, MASKED: tl.constexpr, STOPS: tl.constexpr, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Load logits over temperature of some tokens of a row; -inf for masked tokens, NaN and past the end."""
    raw = tl.load(logits_ptr + tokens, mask=tokens < V, other=-float("inf"))
    out = is_out(
        forbidden_ptr, index_ptr, octets_ptr, octets_stride, stops_ptr, stops_stride, stop_stride,
        row, tokens, V, MASKED, STOPS, FIRST,
    )  # fmt: skip
    scores = raw / temperature
    return tl.where((scores == scores) & ~out, scores, -float("inf"))


def masks_of(draws: SamplingInputs, unused: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    """Returns a kernel's mask arguments: the grammars' index, octets and stride, the early stops and their
    strides; ``unused`` for absent tensors."""
    allowed, stops = draws.allowed, draws.early_stops
    grammars = (
        (unused, unused, 0) if allowed is None else (allowed.index, allowed.octets, allowed.octets.stride(0))
    )
    return *grammars, *((unused, 0, 0) if stops is None else (stops, stops.stride(0), stops.stride(1)))


def masks_in_use(draws: SamplingInputs) -> dict[str, int]:
    """Returns the constants of ``is_out`` that enable masks."""
    return {"MASKED": draws.allowed is not None, "STOPS": 0 if draws.early_stops is None else EARLY_STOPS}
