"""The sum over ranks with the norm and router after it, for ranks that share the memory of one host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.norm import Norm, sum_ending
from chorale.kernels.triton.launch import dependent, is_nvidia
from chorale.kernels.triton.moe.combine import ALL_PAIRS, SomePairs
from chorale.kernels.triton.reduce.choices import _choices_kernel
from chorale.kernels.triton.reduce.memory import Layout
from chorale.kernels.triton.reduce.one_shot import _rows_kernel
from chorale.kernels.triton.reduce.rows import RowExchange
from chorale.kernels.triton.reduce.two_shot import _scattered_kernel
from chorale.parallel.communicator import CommunicationError
from chorale.parallel.peer_memory import PeerMemory

# Seconds that a kernel waits for a peer. Lost peers are detected elsewhere, which ends the wait; this covers
# a peer that still compiles a kernel.
SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Reduced:
    """A result of ``SymmetricReducer.add_norm``. Tensors of a two-shot call are in peer memory and valid
    until the next such call."""

    x: torch.Tensor  # [T, H] float32: the new x. Two-shot: own rows only, unless all were requested
    normed: torch.Tensor | None  # [T, H], if a norm was given
    low: torch.Tensor | None  # [own rows, H]: the rounding error of ``normed`` (two-shot, in bfloat16)


class SymmetricReducer:
    """Adds all ranks' parts to the residual stream and norms it: every rank gets the same bits.

    All ranks make the same calls in the same order, on one stream. No data comes from the host, so calls may
    be captured in a graph. If a peer does not arrive within the limit, the kernels end with NaN results,
    later kernels do not wait, and ``check`` raises.
    """

    def __init__(self, memory: PeerMemory, layout: Layout, seconds: float = SECONDS) -> None:
        """Must be called on all ranks. Raises ``ValueError`` for sizes that the kernels do not support."""
        if memory.size not in (2, 4, 8) or layout.hidden % 8:
            raise ValueError(f"{memory.size} ranks and a hidden size of {layout.hidden}")
        self.memory, self.layout = memory, layout
        self.rank, self.size = memory.rank, memory.size
        device = memory.buffer.device
        self._asm = is_nvidia(device)
        # A thread has eight columns: two threads with the same columns would clear each other's words.
        warps = max(1, triton.next_power_of_2(layout.hidden // 8) // 32)
        self._warps = min(tuning.REDUCE_WARPS, warps)
        pinned = device.type == "cuda"  # kernels write it, and the host reads it even while kernels hang
        self._status = torch.zeros(2, dtype=torch.int64, pin_memory=pinned)
        self.set_limit(seconds)
        self._blocks = triton.cdiv(layout.hidden // 8, tuning.REDUCE_LANES)
        self._counters = triton.next_power_of_2(self._blocks)
        self._few_calls = torch.zeros(layout.few * self._counters, dtype=torch.int32, device=device)
        self._many_calls = torch.zeros(tuning.REDUCE_FLAGS, dtype=torch.int32, device=device)
        self.rows = RowExchange(
            memory.addresses,
            torch.zeros(layout.exchanged, dtype=torch.int32, device=device),
            torch.zeros(layout.exchanged, dtype=torch.int32, device=device),
            self._status.data_ptr(),
            layout.numbers,
            self.rank,
            self.size,
        )
        layout.prepare(memory)

    # -------------------------------------------------------------- host

    def set_limit(self, seconds: float) -> None:
        """Set how long kernels wait for a peer, including captured ones. Longer while ranks may still
        compile."""
        self._status[1] = int(seconds * (1e9 if self._asm else 1e3))  # ns; a poll without PTX: about 1 ms

    @property
    def missing(self) -> int | None:
        """The rank for which a kernel has waited in vain, or None. Makes no call to the GPU."""
        code = int(self._status[0])
        return None if code == 0 else code - 1

    def check(self) -> None:
        """Raises ``CommunicationError`` if a rank was missing."""
        missing = self.missing
        if missing is not None:
            raise CommunicationError(
                f"rank {missing} did not take part in an all-reduce: it has ended or hangs"
            )

    def is_one_shot(self, tokens: int) -> bool:
        return tokens <= min(self.layout.few, tuning.one_shot_rows(self.size))

    # -------------------------------------------------------------- kernels

    def all_gather(self, own: torch.Tensor) -> torch.Tensor | None:
        """Returns the numbers of all ranks, float32 [size, *own.shape], or None if they are too many. Sums
        rows in which the other ranks' numbers are zero."""
        count, hidden = own.numel(), self.layout.hidden
        rows = triton.cdiv(count * self.size, hidden)
        if not self.is_one_shot(rows) or not self._is_wide(rows):
            return None
        parts = torch.zeros(1, rows, hidden, device=own.device)
        parts.view(-1)[self.rank * count : (self.rank + 1) * count] = own.reshape(-1)
        total = self._one_shot(parts, None, torch.zeros(rows, hidden, device=own.device), None).x
        return total.view(-1)[: self.size * count].view(self.size, *own.shape)

    def add_norm(
        self,
        parts: torch.Tensor,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        norm: Norm | None,
        *,
        low: bool = False,
        whole: bool = False,
        some: SomePairs | None = None,
    ) -> Reduced:
        """x [T, H] float32 += bias + the sum of parts [S, T, H] over all ranks; also returns the normed x.

        ``bias`` [H] is this rank's alone. ``low``, ``whole``: a two-shot call also returns the rounding error
        of the norm of own rows; all rows of x. ``some``: only these pairs have parts, in float32 (one-shot,
        no bias).
        """
        if self.is_one_shot(x.shape[0]):
            return self._one_shot(parts, bias, x, norm, some)
        assert some is None
        return self._two_shot(parts, bias, x, norm, low=low, whole=whole)

    def _one_shot(
        self,
        parts: torch.Tensor,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        norm: Norm | None,
        some: SomePairs | None = None,
    ) -> Reduced:
        tokens = x.shape[0]
        normed, (weight, normed_or_x, eps) = sum_ending(norm, x)
        split = norm is None and tokens <= tuning.REDUCE_SPLIT_ROWS  # rows are divided among programs
        constants, warps = self._constants(parts, bias, wide=self._is_wide(tokens)), self._warps
        if split:
            constants["LANES"], warps = tuning.REDUCE_LANES, max(1, tuning.REDUCE_LANES // 32)
        blocks = self._blocks if split else 1
        _rows_kernel[(tokens * blocks,)](
            parts, *(some or ALL_PAIRS), parts if bias is None else bias, x, x, weight, normed_or_x,
            self.memory.addresses, self._few_calls, self._status.data_ptr(),
            tokens, self.rank, parts.stride(0), parts.stride(1), self.layout.few_from, eps,
            K=0 if some is None else some.ids.shape[1], NORM=norm is not None, BLOCKS=blocks,
            COUNTERS=self._counters, num_warps=warps, **constants, **dependent(x),
        )  # fmt: skip
        return Reduced(x, normed, None)

    def _two_shot(
        self,
        parts: torch.Tensor,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        norm: Norm | None,
        *,
        low: bool,
        whole: bool,
    ) -> Reduced:
        layout, tokens = self.layout, x.shape[0]
        if tokens > layout.tokens:
            raise ValueError(f"{tokens} rows, and there is memory for {layout.tokens}")
        rows = triton.cdiv(tokens, self.size)
        low &= norm is not None and norm.dtype != torch.float32
        rest = torch.empty(rows, layout.hidden, dtype=layout.dtype, device=x.device) if low else None
        _scattered_kernel[(min(tuning.reduce_programs(rows), rows),)](
            parts, parts if bias is None else bias, x, x if norm is None else norm.weight,
            x if rest is None else rest, self.memory.addresses, self._many_calls, self._status.data_ptr(),
            tokens, rows, self.rank, parts.stride(0), parts.stride(1),
            layout.words, layout.many_from, layout.normed, layout.whole, layout.flags,
            0.0 if norm is None else norm.eps,
            NORM=norm is not None, NORM_WIDE=norm is not None and norm.dtype == torch.float32, LOW=low,
            WHOLE=whole, FLAGS=tuning.REDUCE_FLAGS,
            **self._constants(parts, bias, wide=layout.dtype == torch.float32),
            num_warps=self._warps, **dependent(x),
        )  # fmt: skip
        result, memory = layout.result, self.memory
        return Reduced(
            result(memory, layout.whole, tokens, torch.float32) if whole else x,
            None if norm is None else result(memory, layout.normed, tokens, norm.dtype),
            None if rest is None else rest[: len(self.own_rows(tokens))],
        )

    def own_rows(self, tokens: int) -> range:
        """Returns the rows of a two-shot call that this rank sums."""
        rows = triton.cdiv(tokens, self.size)
        return range(min(self.rank * rows, tokens), min((self.rank + 1) * rows, tokens))

    def can_share_choices(self, tokens: int, top_k: int) -> bool:
        words = triton.cdiv(triton.cdiv(tokens, self.size), self.layout.hidden // 8)
        return top_k <= 4 and words <= self.layout.few

    def share_choices(
        self, own_ids: torch.Tensor, own_gates: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return expert ids and gates of all T rows, from each rank's [own rows, K] int64 and float32."""
        rows, top_k, hidden = triton.cdiv(tokens, self.size), own_ids.shape[1], self.layout.hidden
        ids = torch.empty(tokens, top_k, dtype=torch.int64, device=own_ids.device)
        gates = torch.empty(tokens, top_k, dtype=torch.float32, device=own_ids.device)
        _choices_kernel[(triton.cdiv(rows, hidden // 8),)](
            own_ids, own_gates, ids, gates, self.memory.addresses, self._few_calls, self._status.data_ptr(),
            tokens, rows, self.rank, self.layout.few_from,
            H=hidden, N=self.size, K=top_k, LANES=triton.next_power_of_2(hidden // 8),
            COUNTERS=self._counters, ASM=self._asm,
            num_warps=self._warps, **dependent(own_ids),
        )  # fmt: skip
        return ids, gates

    def _is_wide(self, tokens: int) -> bool:
        return self.layout.dtype == torch.float32 or tokens <= tuning.REDUCE_WIDE_ROWS

    def _constants(self, parts: torch.Tensor, bias: torch.Tensor | None, *, wide: bool) -> dict[str, Any]:
        hidden = self.layout.hidden
        return {
            "H": hidden,
            "N": self.size,
            "SPLITS": parts.shape[0],
            "HAS_BIAS": bias is not None,
            "WIDE": wide,
            "LANES": triton.next_power_of_2(hidden // 8),
            "ASM": self._asm,
        }
