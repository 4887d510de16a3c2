"""Paged attention with sinks and a window, in plain torch: the specification.

Query ``i`` of a row, at position ``p``, sees keys ``0..p`` (full layers) or ``p - window + 1 .. p`` (layers
with a window). With scores ``s = q k / sqrt(D)`` the weights are ``exp(s) / (exp(sink) + sum exp(s))``: the
sink is one more logit of the softmax, without a value. All of it is float32, whatever the type of the blocks.

Rows with one new token are batched by similar length, so that a decode step of many rows is a few large
matrix products. Other rows are computed one by one, in chunks of queries, so that no [T, context] tensor has
more than ``_MAX_SCORES`` elements. Blocks are read only at positions that some query of the row sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from chorale.kernels.ops import AttentionMeta, AttentionShape, LayerCache
from chorale.kernels.reference.kv_elements import gather_blocks

_MAX_SCORES = 16 * 2**20  # elements of one score tensor: 64 MB
_MAX_GATHER = 16 * 2**20  # elements of K and V gathered at once for batched decodes: 64 MB
_WINDOW_CHUNK = 256  # queries at once in a window layer; their keys overlap, so long chunks waste little
_SMALLEST_BUCKET = 16  # blocks; all shorter decodes share one batch


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one cache group whose keys are gathered together.

    ``chunks`` indexes kv viewed as [num_blocks * 2 * Nkv, block_size * D] and gives K, then V, in the order
    [2, rows, Nkv, blocks]. Only the gathered positions ``first:last`` are used.
    """

    tokens: torch.Tensor | slice  # the rows' queries among the T tokens
    chunks: torch.Tensor  # [2 * rows * Nkv * blocks] int64
    num_rows: int
    first: int  # index within the gathered positions
    last: int
    hidden: torch.Tensor | None  # [rows, 1, last - first, 1] bool: positions that a row does not see
    start: int = 0  # prefill: position of key ``first``
    position: int = 0  # prefill: position of the first query
    window: int | None = None  # prefill: tokens that each query sees


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The part of attention that all layers of a step share."""

    shape: AttentionShape
    block_size: int
    num_tokens: int
    slot_block: tuple[torch.Tensor, torch.Tensor]  # by group, [T]: block of each new token
    slot_offset: tuple[torch.Tensor, torch.Tensor]  # by group, [T]: offset within the block
    decodes: tuple[tuple[RowGroup, ...], tuple[RowGroup, ...]]  # by group
    prefills: tuple[tuple[RowGroup, ...], tuple[RowGroup, ...]]


def plan_attention(meta: AttentionMeta, shape: AttentionShape, block_size: int) -> AttentionPlan:
    starts = meta.query_start.tolist()
    contexts = meta.context_lens.tolist()
    singles = [row for row in range(len(contexts)) if starts[row + 1] - starts[row] == 1]
    several = [row for row in range(len(contexts)) if starts[row + 1] - starts[row] > 1]
    decodes, prefills = [], []
    for group, table in enumerate(meta.block_tables):
        window = shape.window(group) or None
        planner = _Planner(table, shape.num_kv_heads, shape.head_dim, block_size, window, starts, contexts)
        decodes.append(tuple(planner.decode_batches(singles)))
        prefills.append(tuple(planner.prefill(row) for row in several))
    return AttentionPlan(
        shape=shape,
        block_size=block_size,
        num_tokens=starts[-1],
        slot_block=(meta.slots[0] // block_size, meta.slots[1] // block_size),
        slot_offset=(meta.slots[0] % block_size, meta.slots[1] % block_size),
        decodes=(decodes[0], decodes[1]),
        prefills=(prefills[0], prefills[1]),
    )


@dataclass(frozen=True, slots=True)
class _Planner:
    """Determines the blocks that each row reads in one group."""

    table: torch.Tensor
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    starts: list[int]
    contexts: list[int]

    def decode_batches(self, rows: list[int]) -> Iterator[RowGroup]:
        """Return batches of rows with block counts within a factor of two, each within the memory limit."""
        if len(rows) == 1:
            yield self._decode(rows)
            return
        buckets: dict[int, list[int]] = {}
        for row in rows:
            num_blocks = -(-self.contexts[row] // self.block_size) - self._lowest(row) // self.block_size
            bucket = max(_SMALLEST_BUCKET, 1 << (num_blocks - 1).bit_length())
            buckets.setdefault(bucket, []).append(row)
        for bucket, members in sorted(buckets.items()):
            elements = 2 * bucket * self.block_size * self.num_kv_heads * self.head_dim
            step = max(1, _MAX_GATHER // elements)
            for begin in range(0, len(members), step):
                yield self._decode(members[begin : begin + step])

    def prefill(self, row: int) -> RowGroup:
        begin, end = self.starts[row], self.starts[row + 1]
        lowest, context = self._lowest(row), self.contexts[row]
        first_block = lowest // self.block_size
        blocks = self.table[row : row + 1, first_block : -(-context // self.block_size)].long()
        return RowGroup(
            tokens=slice(begin, end),
            chunks=self._chunks(blocks),
            num_rows=1,
            first=lowest - first_block * self.block_size,
            last=context - first_block * self.block_size,
            hidden=None,
            start=lowest,
            position=context - (end - begin),
            window=self.window,
        )

    def _lowest(self, row: int) -> int:
        """Return the lowest position that any query of the row sees."""
        if self.window is None:
            return 0
        first_query = self.contexts[row] - (self.starts[row + 1] - self.starts[row])
        return max(0, first_query - self.window + 1)

    def _decode(self, rows: list[int]) -> RowGroup:
        size = self.block_size
        lowest = [self._lowest(row) for row in rows]
        first_blocks = [low // size for low in lowest]
        # Positions relative to each row's first gathered block.
        first = [low - block * size for low, block in zip(lowest, first_blocks, strict=True)]
        last = [self.contexts[row] - block * size for row, block in zip(rows, first_blocks, strict=True)]
        num_blocks = -(-max(last) // size)
        if len(rows) == 1:
            blocks = self.table[rows[0] : rows[0] + 1, first_blocks[0] : first_blocks[0] + num_blocks].long()
            tokens: torch.Tensor | slice = slice(self.starts[rows[0]], self.starts[rows[0]] + 1)
            return RowGroup(tokens, self._chunks(blocks), 1, first[0], last[0], None)
        columns = self._tensor(first_blocks).unsqueeze(1) + self._range(0, num_blocks)  # [rows, num_blocks]
        own = self._tensor([(self.contexts[row] - 1) // size for row in rows]).unsqueeze(1)
        # Shorter rows repeat their own last block (hidden below) instead of reading past their table.
        blocks = self.table[self._tensor(rows)].gather(1, torch.minimum(columns, own)).long()
        low, high = min(first), max(last)
        cells = self._range(low, high).unsqueeze(0)
        hidden = (cells < self._tensor(first).unsqueeze(1)) | (cells >= self._tensor(last).unsqueeze(1))
        return RowGroup(
            tokens=self._tensor([self.starts[row] for row in rows]),
            chunks=self._chunks(blocks),
            num_rows=len(rows),
            first=low,
            last=high,
            hidden=hidden[:, None, :, None] if bool(hidden.any()) else None,
        )

    def _chunks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Convert block ids [rows, blocks] to a flat index of (K|V, row, kv head, block) chunks."""
        heads = self._range(0, self.num_kv_heads).view(1, 1, -1, 1)
        which = self._range(0, 2).view(2, 1, 1, 1)
        index = (blocks[None, :, None, :] * 2 + which) * self.num_kv_heads + heads
        return index.reshape(-1)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=self.table.device)

    def _range(self, low: int, high: int) -> torch.Tensor:
        return torch.arange(low, high, device=self.table.device)


def attention(q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """q [T, Nq, D], sinks [Nq] -> [T, Nq * D] float32."""
    plan, group, kv = cache.plan, cache.group, cache.kv
    decodes, prefills = plan.decodes[group], plan.prefills[group]
    shape = plan.shape
    q = q * shape.head_dim**-0.5
    sinks = sinks.view(shape.num_kv_heads, -1, 1)  # [Nkv, G, 1]
    if len(decodes) == 1 and not prefills and decodes[0].num_rows == plan.num_tokens == 1:
        return _decode(q, kv, sinks, decodes[0], shape)
    out = torch.empty(q.shape[0], shape.num_heads * shape.head_dim, device=q.device)
    for rows in decodes:
        out[rows.tokens] = _decode(q[rows.tokens], kv, sinks, rows, shape)
    for rows in prefills:
        out[rows.tokens] = _prefill(q[rows.tokens], kv, sinks, rows, shape)
    return out


def _gather(kv: torch.Tensor, rows: RowGroup, shape: AttentionShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V, each [rows, Nkv, L, D] float32 with L = last - first."""
    gathered = gather_blocks(kv, rows.chunks)
    both = gathered.view(2, rows.num_rows, shape.num_kv_heads, -1, shape.head_dim)
    k, v = both[:, :, :, rows.first : rows.last].float()
    return k, v


def _decode(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, rows: RowGroup, shape: AttentionShape
) -> torch.Tensor:
    """Attention with one query per row: q [rows, Nq, D] -> [rows, Nq * D]."""
    k, v = _gather(kv, rows, shape)
    q = q.view(rows.num_rows, shape.num_kv_heads, -1, shape.head_dim)  # [rows, Nkv, G, D]
    scores = q @ k.transpose(-1, -2)  # [rows, Nkv, G, L]
    if rows.hidden is not None:
        scores.masked_fill_(rows.hidden.transpose(-1, -2), -torch.inf)
        # A stale NaN in another request's element must not spread: 0 * NaN.
        v = v.masked_fill(rows.hidden, 0.0)
    return (_softmax_with_sink(scores, sinks) @ v).view(rows.num_rows, -1)


def _prefill(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, rows: RowGroup, shape: AttentionShape
) -> torch.Tensor:
    """Attention of one row's queries at consecutive positions: q [Q, Nq, D] -> [Q, Nq * D]."""
    k, v = (tensor[0] for tensor in _gather(kv, rows, shape))  # [Nkv, L, D]
    num_queries = q.shape[0]
    q = q.view(num_queries, shape.num_kv_heads, -1, shape.head_dim).permute(1, 2, 0, 3)  # [Nkv, G, Q, D]
    groups = q.shape[1]
    out = torch.empty(num_queries, shape.num_kv_heads, groups, shape.head_dim, device=q.device)
    chunk = max(1, _MAX_SCORES // (shape.num_heads * k.shape[1]))
    if rows.window is not None:
        chunk = min(chunk, _WINDOW_CHUNK) if chunk < num_queries else max(1, min(num_queries, _WINDOW_CHUNK))
    for begin in range(0, num_queries, chunk):
        end = min(begin + chunk, num_queries)
        # Keys begin:end of this chunk as indices into k, whose key 0 is at position rows.start.
        high = rows.position + end - rows.start
        low = 0 if rows.window is None else max(0, rows.position + begin - rows.window + 1 - rows.start)
        queries = q[:, :, begin:end].reshape(shape.num_kv_heads, -1, shape.head_dim)
        scores = (queries @ k[:, low:high].transpose(-1, -2)).view(-1, groups, end - begin, high - low)
        hidden = _hidden(end - begin, high - low, rows.window, q.device)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        weights = _softmax_with_sink(scores, sinks.unsqueeze(-1))  # [Nkv, G, q, L]
        attended = weights.reshape(shape.num_kv_heads, -1, high - low) @ v[:, low:high]
        out[begin:end] = attended.view(shape.num_kv_heads, groups, end - begin, -1).permute(2, 0, 1, 3)
    return out.view(num_queries, -1)


def _hidden(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return [queries, keys] bool, True where a query must not attend. The last query is at the last key."""
    if num_queries == 1:
        return None  # the single query sees all gathered keys
    query = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    key = torch.arange(num_keys, device=device).unsqueeze(0)
    hidden = key > query
    return hidden if window is None else hidden | (key <= query - window)


def _softmax_with_sink(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Softmax over [scores, sink] along the last dimension, without the sink's column."""
    column = sinks.expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
