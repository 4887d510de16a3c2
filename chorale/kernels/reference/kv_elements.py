"""KV elements in plain torch: the specification of ``kernels/triton/kv_elements.py``.

A block holds bfloat16, float32, or e4m3 with a scale of 1: one byte per value, three bits of mantissa; values
beyond +-448 become +-448 (the format has no infinity, so the alternative would be NaN), NaN stays NaN.
"""

from __future__ import annotations

import torch

LARGEST_E4M3 = 448.0


def write_kv(kv: torch.Tensor, block: torch.Tensor, offset: torch.Tensor, values: torch.Tensor) -> None:
    """Write values [T, 2, Nkv, D] to kv [num_blocks, 2, Nkv, block_size, D] at (block[t], offset[t])."""
    if kv.dtype == torch.float8_e4m3fn:
        values = values.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(kv.dtype).view(torch.uint8)
        kv = kv.view(torch.uint8)
    kv[block, :, :, offset] = values.to(kv.dtype)


def gather_blocks(kv: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """Return rows ``chunks`` of kv, viewed as [num_blocks * 2 * Nkv, block_size * D], in kv's dtype."""
    flat = kv.view(-1, kv.shape[3] * kv.shape[4])
    if kv.dtype == torch.float8_e4m3fn:
        return flat.view(torch.uint8).index_select(0, chunks).view(kv.dtype)
    return flat.index_select(0, chunks)
