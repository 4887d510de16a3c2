"""Capture sizes: a batch runs in the next larger captured size, padded with dummy rows. Torch-free.

Decode steps of up to eight rows have a graph for every size, because a dummy row costs as much as a real row
there: its experts are read for it alone. In larger steps, at most an eighth of the rows are dummies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from chorale.errors import ConfigError

_EXACT = 8
# Up to this many rows, decode attention splits a context into as many parts as fill the device. A split for
# long contexts is slow for short ones, so such batches have graphs for several lengths.
_SPLIT_ROWS = 4
_CONTEXTS = (512, 1024, 2048)
# Tokens of mixed steps: above these, the device takes longer than the host's launches. Sizes from 1,024 are
# for a prompt of the least chunk (``engine/scheduling/pace.py``) together with many streams.
MIXED_TOKENS = (
    *(16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896),
    *(1024, 1152, 1280, 1536),
)
MIXED_ROWS = (4, 16, 64, 256)  # dummies included
# Captured before the engine is ready; other sizes when the engine is idle, or when needed. Few, because on a
# machine's first start each also compiles kernels.
FIRST_ROWS = (1, 2, 8, 64)
FIRST_TOKENS = (128, 1024)
BUSY_TOKENS = (1024, 1152, 1280)  # captured next, for many rows: they occur when the engine is never idle
MOST_DRAFTING_ROWS = 64  # maximum rows of a step with drafts, which pay off only in small batches
FILTERED_ROWS = 16  # maximum rows of graphs with filters that are captured when the engine is idle


def row_sizes(most: int) -> tuple[int, ...]:
    """Return the graphs' numbers of rows for batches of up to ``most`` rows, ascending; the last is
    ``most``."""
    sizes = list(range(1, min(most, _EXACT) + 1))
    while sizes[-1] < most:
        step = max(2, 1 << (sizes[-1].bit_length() - 3))
        sizes.append(min(most, sizes[-1] + step))
    return tuple(sizes)


def draft_sizes(most: int) -> tuple[int, ...]:
    """Return the graphs' draft tokens per row for drafts of up to ``most``, ascending."""
    return (*(size for size in (1, 2, 3, 4, 6, 8, 12) if size < most), most)


def chosen_sizes(asked: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the operator's sizes, capped at ``most``. Raises ``ConfigError``."""
    if not asked or min(asked) < 1:
        raise ConfigError("--cudagraph-capture-sizes: needs numbers of rows, each at least 1")
    return tuple(sorted({min(size, most) for size in asked}))


def context_sizes(rows: int, longest: int) -> tuple[int, ...]:
    """Return the longest contexts of the graphs of ``rows`` rows, ascending."""
    short = _CONTEXTS if rows <= _SPLIT_ROWS else ()
    return (*(size for size in short if size < longest), longest)


def pick(sizes: Sequence[int], wanted: int) -> int:
    """Return the smallest of the ascending ``sizes`` >= ``wanted``. Raises ``IndexError`` if there is
    none."""
    return sizes[bisect_left(sizes, wanted)]
