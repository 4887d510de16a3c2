"""Sampling noise as a pure function: f(seed, position, token id), the same on every device and in any batch.

There is no generator state, so a preempted, re-batched or replayed sequence draws the same noise again. A
fused kernel must reproduce these integers exactly:

finish(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
key = finish(finish(seed + G) + (position + 1) * G),  G = 0x9E3779B97F4A7C15       (uint64, wrapping)
a, b = low and high 32 bits of key
x = token_id * 0x9E3779B9 + a                                                      (uint32, wrapping)
x ^= x >> 16;  x *= 0x21F0AAAD;  x ^= b;  x ^= x >> 15;  x *= 0x735A2D97;  x ^= x >> 15
v = min(float32(x >> 1) * 2^-31 + 2^-32, 1 - 2^-24)                                (in (0, 1))
noise = -log(-log1p(-v))                                                           (Gumbel, u = 1 - v)

``b`` enters between the two multiplications, so that two keys whose ``a`` differ by a multiple of the token
step do not give shifted copies of one stream. ``v`` is small where the noise is large. Float32 is finer near
0 than near 1, so the tail of the distribution is resolved down to 2^-32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = 2**64 - 1


def row_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return [N, 2] int32: the words ``a`` and ``b`` of each row. Arithmetic wraps at 64 bits."""
    with np.errstate(over="ignore"):
        key = _finish(seeds + _GOLDEN)
        key = _finish(key + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    words = np.empty((len(key), 2), np.uint32)
    words[:, 0] = key & np.uint64(0xFFFFFFFF)
    words[:, 1] = key >> np.uint64(32)
    return words.view(np.int32)


def key_bases(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return [N] int64: the part of the keys that does not depend on the position, for ``position_keys``."""
    with np.errstate(over="ignore"):
        return _finish(seeds + _GOLDEN).view(np.int64)


def position_keys(bases: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``row_keys`` on a device: returns [N, 2] int32 for ``bases`` [N] int64 of ``key_bases`` and
    ``positions`` [N] int64."""
    z = bases + (positions + 1) * _GOLDEN_SIGNED  # wraps like int64 in torch
    z = (z ^ (z >> 30 & 0x3FFFFFFFF)) * _FIRST_64
    z = (z ^ (z >> 27 & 0x1FFFFFFFFF)) * _SECOND_64
    z = z ^ (z >> 31 & 0x1FFFFFFFF)
    return z.view(torch.int32).view(-1, 2)  # the low word comes first


def wrap_seed(seed: int) -> int:
    """Reduce a Python integer to the 64 bits that are hashed."""
    return seed & _MASK64


def _finish(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def token_steps(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return [V] int32: ``token_id * 0x9E3779B9``, for ``gumbel_noise``."""
    ids = torch.arange(num_tokens, dtype=torch.int64, device=device)
    return _wrapped(ids * 0x9E3779B9)


def _wrapped(values: torch.Tensor) -> torch.Tensor:
    """Convert int64 to int32 with the same low 32 bits."""
    return ((values + 2**31) % 2**32 - 2**31).to(torch.int32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _signed_64(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GOLDEN_SIGNED = _signed_64(0x9E3779B97F4A7C15)
_FIRST_64, _SECOND_64 = _signed_64(0xBF58476D1CE4E5B9), _signed_64(0x94D049BB133111EB)
_FIRST, _SECOND = _signed(0x21F0AAAD), _signed(0x735A2D97)


def gumbel_noise(
    keys: torch.Tensor, steps: torch.Tensor, space: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Return [N, V] float32 Gumbel noise for ``keys`` [N, 2] int32 and ``steps`` [V] int32.

    ``space``: two [N, V] float32 tensors of scratch memory; the first becomes the result. int32 tensors wrap
    like uint32; ``>>`` on them is arithmetic, so its sign bits are masked off.
    """
    shape = (len(keys), len(steps))
    v, work = space or (torch.empty(shape, device=keys.device), torch.empty(shape, device=keys.device))
    scratch, x = v.view(torch.int32), work.view(torch.int32)
    torch.add(steps, keys[:, :1], out=x)
    torch.bitwise_right_shift(x, 16, out=scratch)
    x ^= scratch.bitwise_and_(0xFFFF)
    x *= _FIRST
    x ^= keys[:, 1:]
    torch.bitwise_right_shift(x, 15, out=scratch)
    x ^= scratch.bitwise_and_(0x1FFFF)
    x *= _SECOND
    torch.bitwise_right_shift(x, 15, out=scratch)
    x ^= scratch.bitwise_and_(0x1FFFF)
    x >>= 1
    x &= 0x7FFFFFFF
    v.copy_(x).mul_(2.0**-31).add_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()
