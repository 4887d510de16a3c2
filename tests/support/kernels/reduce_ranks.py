"""Scenarios of ``twins_ranks.py``: the all-reduce in Triton's interpreter, one process per rank.

Peers' memory is shared memory of the CPU. Each rank compares its results with a reference computed from the
partial sums of all ranks; this process checks that the bits are equal on all ranks. It prints one line for
each scenario in float32 and in bfloat16.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from chorale.errors import EngineError
from chorale.kernels import mxfp4
from chorale.kernels.ops import ExpertTensors, QkvWeights, Routed, RouterWeights
from chorale.kernels.reference import moe as reference_moe
from chorale.kernels.reference import ops as reference_ops
from chorale.kernels.reference import reduce as reference
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.linear import pack_linear
from chorale.kernels.triton.dense.norm import Norm
from chorale.kernels.triton.moe.combine import SomePairs
from chorale.kernels.triton.moe.packing import Owned, pack_experts
from chorale.kernels.triton.moe.router import pack_router
from chorale.kernels.triton.reduce import one_shot, two_shot
from chorale.kernels.triton.reduce import ops as reduce_ops
from chorale.kernels.triton.reduce.memory import Layout
from chorale.kernels.triton.reduce.reducer import SymmetricReducer
from chorale.parallel.peer_memory import PeerMemory
from chorale.parallel.shares import cut
from tests.support.kernels.ranks import FORK, SECONDS, on_ranks

H, EPS = 96, 1e-5  # twelve lanes of eight columns, so that some of 16 lanes are out of bounds
EXPERTS, ATTENDED = 8, 64
FEW, TOKENS = 6, 21
SPLITS = 3
Digest = tuple[str, ...]


class Rank:
    """One rank of a scenario; each knows the partial sums of all ranks."""

    def __init__(
        self, memory: PeerMemory, dtype: torch.dtype, seconds: float = SECONDS, seed: int = 0
    ) -> None:
        self.rank, self.size, self.dtype = memory.rank, memory.size, dtype
        self.layout = Layout(memory.size, H, TOKENS, FEW, dtype)
        self.memory = memory
        self.reducer = SymmetricReducer(memory, self.layout, seconds)
        self.generator = torch.Generator().manual_seed(seed)
        self.norm = self.randn(H)
        self.router = (self.randn(EXPERTS, H), self.randn(EXPERTS))

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def inputs(
        self, tokens: int, *, strided: bool = False
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Returns (x, partial sums [S, T, H] of each rank, bias of rank 0), the same on every rank."""
        parts = [self.randn(SPLITS, tokens, H) for _ in range(self.size)]
        if strided:
            parts = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]
        return self.randn(tokens, H), parts, self.randn(H)

    def bias(self, bias: torch.Tensor, rank: int) -> torch.Tensor | None:
        return bias if rank == 0 else None

    def sent(self, parts: list[torch.Tensor], bias: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        wide = self.reducer.is_one_shot(tokens) and tokens <= tuning.REDUCE_WIDE_ROWS
        dtype = torch.float32 if wide else self.dtype
        return [reference.sent_part(p, self.bias(bias, rank), dtype) for rank, p in enumerate(parts)]

    def check_norm(self, found: torch.Tensor | None, expected: torch.Tensor) -> None:
        assert found is not None
        assert found.dtype == self.dtype
        bound = 1e-5 if self.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found.float(), expected, rtol=bound, atol=1e-6)

    def check_empty(self) -> None:
        """Asserts that the readers have cleared all words, and that no rank has begun the next call."""
        self.memory.barrier()
        assert bool((self.memory.buffer[: self.layout.normed // 4] == -1).all())
        self.memory.barrier()


def digest(*tensors: torch.Tensor | None) -> Digest:
    return tuple(
        "-" if t is None else hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for t in tensors
    )


# ------------------------------------------------------------------ scenarios of one rank


def few_rows(memory: PeerMemory, dtype: torch.dtype, *, wide: bool = True) -> list[Digest]:
    """One-shot calls of different sizes, so that row counters differ; two programs per row without a norm.

    Not ``wide``: calls round the values that they send, and have lanes that are out of bounds.
    """
    if wide:
        tuning.REDUCE_LANES = 8
    else:
        tuning.REDUCE_WIDE_ROWS = 0
    rank, found = Rank(memory, dtype), []
    for call, tokens in enumerate((1, 3, 6, 2, 1)):
        x, parts, bias = rank.inputs(tokens, strided=call % 2 == 1)
        parts = parts if wide else [part.to(dtype) for part in parts]
        mine = x.clone()
        norm = Norm(rank.norm, EPS, dtype) if call != 4 else None
        reduced = rank.reducer.add_norm(parts[rank.rank], rank.bias(bias, rank.rank), mine, norm)
        rank.reducer.check()
        summed, normed = reference.add_norm(rank.sent(parts, bias, tokens), x, rank.norm, EPS)
        assert reduced.x is mine
        assert torch.equal(mine, summed), (tokens, mine - summed)
        if norm is not None:
            rank.check_norm(reduced.normed, normed)
        rank.check_empty()
        found.append(digest(reduced.x, reduced.normed))
    return found


def many_rows(memory: PeerMemory, dtype: torch.dtype) -> list[Digest]:
    """Two-shot calls: each rank has its own rows of x, and all of the norm."""
    tuning.reduce_programs = lambda rows: 3  # more rows than programs
    rank, found = Rank(memory, dtype), []
    for tokens in (21, 7, 18):
        x, parts, bias = rank.inputs(tokens)
        given, mine = parts[rank.rank].to(dtype), x.clone()
        owned = -(-tokens // rank.size)
        mine[: rank.rank * owned] = float("nan")  # rows that other ranks own
        mine[(rank.rank + 1) * owned :] = float("nan")
        norm = Norm(rank.norm, EPS, dtype)
        reduced = rank.reducer.add_norm(given, rank.bias(bias, rank.rank), mine, norm, low=True)
        rank.reducer.check()
        sent = rank.sent([part.to(dtype) for part in parts], bias, tokens)
        summed, normed = reference.add_norm(sent, x, rank.norm, EPS)
        own = slice(rank.rank * owned, (rank.rank + 1) * owned)
        assert torch.equal(reduced.x[own], summed[own])
        rank.check_norm(reduced.normed, normed)
        if dtype == torch.bfloat16:
            assert reduced.normed is not None
            assert reduced.low is not None
            both = reduced.normed[own].float() + reduced.low.float()
            torch.testing.assert_close(both, normed[own], rtol=2**-15, atol=1e-6)
        found.append(digest(reduced.normed))
        found += shared_choices(rank, tokens)
        rank.check_empty()
        memory.barrier()  # the next call overwrites what the digest reads
        last = rank.reducer.add_norm(given, rank.bias(bias, rank.rank), reduced.x, None, whole=True)
        rank.reducer.check()
        assert last.normed is None
        assert torch.equal(last.x, reference.add_norm(sent, summed, rank.norm, EPS)[0])
        found.append(digest(last.x))
        memory.barrier()
    return found


def shared_choices(rank: Rank, tokens: int) -> list[Digest]:
    """Each rank chooses experts for its own rows; all ranks get all choices, of four experts and of three."""
    found = []
    for top_k in (4, 3):
        ids = torch.arange(tokens * top_k).view(tokens, top_k) % 128
        gates = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(tokens))
        gates[0, 0], gates[-1, -1] = float("nan"), 0.0
        own = rank.reducer.own_rows(tokens)
        mine = slice(own.start, own.stop)
        assert rank.reducer.can_share_choices(tokens, top_k)
        shared = rank.reducer.share_choices(ids[mine].clone(), gates[mine].clone(), tokens)
        rank.reducer.check()
        torch.testing.assert_close(shared, (ids, gates), rtol=0, atol=0, equal_nan=True)
        rank.check_empty()
        found.append(digest(shared[0], torch.nan_to_num(shared[1])))
    return found


def ops_of_the_model(memory: PeerMemory, dtype: torch.dtype) -> list[Digest]:
    """``project_and_route`` and ``moe`` of each rank's columns: one-shot with the router and without,
    two-shot."""
    if dtype == torch.bfloat16:
        return []  # the interpreter cannot multiply bfloat16
    tuning.FEW_LOGITS = 2 * EXPERTS
    rank, found = Rank(memory, dtype), []
    given = RouterWeights(rank.norm, pack_router(*rank.router, dtype), 4, dtype)
    plain = RouterWeights(rank.norm, reference_ops.pack_linear(*rank.router), 4)
    weight, bias = rank.randn(H, ATTENDED), rank.randn(H)
    each = ATTENDED // rank.size
    own = slice(rank.rank * each, (rank.rank + 1) * each)
    linear = pack_linear(weight[:, own].contiguous(), rank.bias(bias, rank.rank))
    tensors = [expert_tensors(rank, 32) for _ in range(rank.size)]
    experts = pack_experts(tensors[rank.rank])
    qkv = QkvWeights(rank.randn(H), pack_linear(rank.randn(H, H), None))
    for tokens, is_last in ((1, False), (4, True), (TOKENS, False), (TOKENS, True)):
        x, attended = rank.randn(tokens, H), rank.randn(tokens, ATTENDED)
        total, expected = reference_ops.project_and_route(
            attended, reference_ops.pack_linear(weight, bias), x.clone(), plain, EPS
        )
        mine, routed = reduce_ops.project_and_route(
            rank.reducer, attended[:, own].contiguous(), linear, x, given, EPS
        )
        assert torch.equal(routed.expert_ids, expected.expert_ids)
        torch.testing.assert_close(routed.gates, expected.gates, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(routed.normed, expected.normed, rtol=1e-4, atol=1e-5)
        found.append(digest(*routed))
        memory.barrier()  # the next call overwrites what the digest reads
        for some in tensors:
            total = reference_moe.moe(expected, reference_moe.pack_experts(some), total)
        summed, following = reduce_ops.moe(rank.reducer, routed, experts, mine, None if is_last else qkv, EPS)
        rank.reducer.check()
        rows = slice(None)
        if tokens == TOKENS and not is_last:
            owned = -(-tokens // rank.size)
            rows = slice(rank.rank * owned, (rank.rank + 1) * owned)
            assert following is not None
            torch.testing.assert_close(
                following, reference_ops.rms_norm(total, qkv.norm, EPS), rtol=1e-4, atol=1e-5
            )
            found.append(digest(following))
        else:
            assert following is None
            found.append(digest(summed))
        torch.testing.assert_close(summed[rows], total[rows], rtol=1e-4, atol=1e-4)
        memory.barrier()
    return found


def expert_tensors(rank: Rank, inter: int) -> ExpertTensors:
    def draw(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights = rank.randn(EXPERTS, rows, columns) / columns**0.5
        blocks, scales = zip(*(mxfp4.quantize(each) for each in weights), strict=True)
        return torch.stack(blocks), torch.stack(scales)

    gate_up, down = draw(2 * inter, H), draw(H, inter)
    return ExpertTensors(
        rank.randn(EXPERTS, 2 * inter), rank.randn(EXPERTS, H), 1.5, 1.702, 1, torch.float32,
        gate_up[0], gate_up[1], down[0], down[1],
    )  # fmt: skip


def whole_experts(memory: PeerMemory, dtype: torch.dtype) -> list[Digest]:
    """Ranks with whole experts: each adds only its own pairs (others are NaN and not read), and ``moe``."""
    rank, found = Rank(memory, dtype), []
    shares = cut(EXPERTS - 1, rank.size, 1, "experts")  # no rank has the last expert: it adds nothing
    mine = shares[rank.rank]
    for tokens in (1, 4, FEW):
        ids = torch.stack([torch.randperm(EXPERTS, generator=rank.generator)[:4] for _ in range(tokens)])
        ids[tokens // 2 :] = ids[tokens // 2 :].clamp(max=shares[0].stop - 1)  # all of the first rank
        x = rank.randn(tokens, H)
        parts = [rank.randn(8, tokens, H) for _ in range(rank.size)]  # two partial sums per pair
        own = [((ids >= s.start) & (ids < s.stop)).t().repeat_interleave(2, 0).unsqueeze(2) for s in shares]
        given = parts[rank.rank].masked_fill(~own[rank.rank], torch.nan)
        some = SomePairs(ids, mine.start, len(mine))
        reduced = rank.reducer.add_norm(given, None, x.clone(), Norm(rank.norm, EPS, dtype), some=some)
        rank.reducer.check()
        whole = [part.masked_fill(~is_own, 0.0) for part, is_own in zip(parts, own, strict=True)]
        sent = [reference.sent_part(part, None, torch.float32) for part in whole]
        summed, normed = reference.add_norm(sent, x, rank.norm, EPS)
        assert torch.equal(reduced.x, summed)
        rank.check_norm(reduced.normed, normed)
        rank.check_empty()
        found.append(digest(reduced.x, reduced.normed))
    return found if dtype == torch.bfloat16 else found + moe_of_whole_experts(memory, rank)


def moe_of_whole_experts(memory: PeerMemory, rank: Rank) -> list[Digest]:
    """One-shot and two-shot, in float32 only: the interpreter cannot multiply bfloat16."""
    found: list[Digest] = []
    tensors, mine = expert_tensors(rank, 32), cut(EXPERTS, rank.size, 1, "experts")[rank.rank]
    names = ("gate_up_bias", "down_bias", "gate_up_blocks", "gate_up_scales", "down_blocks", "down_scales")
    part = replace(tensors, **{name: getattr(tensors, name)[mine.start : mine.stop] for name in names})
    experts = replace(pack_experts(part), owned=Owned(mine.start, EXPERTS))
    for tokens in (1, 4, TOKENS):
        x, normed = rank.randn(tokens, H), rank.randn(tokens, H)
        ids = torch.stack([torch.randperm(EXPERTS, generator=rank.generator)[:4] for _ in range(tokens)])
        routed = Routed(normed, ids, torch.softmax(rank.randn(tokens, 4), -1))
        total = reference_moe.moe(routed, reference_moe.pack_experts(tensors), x.clone())
        summed, _ = reduce_ops.moe(rank.reducer, routed, experts, x, None, EPS)
        rank.reducer.check()
        torch.testing.assert_close(summed, total, rtol=1e-4, atol=1e-4)
        found.append(digest(summed))
        memory.barrier()
    return found


def odd_numbers(memory: PeerMemory, dtype: torch.dtype) -> list[Digest]:
    """Numbers with the bits of an empty word, negative zeros and infinities."""
    found: list[Digest] = []
    for wide in (True, False):
        tuning.REDUCE_WIDE_ROWS = 16 if wide else 0
        rank = Rank(memory, dtype, seed=int(wide))
        x, parts, _ = rank.inputs(1)
        part = parts[rank.size - 1][:1]
        part.view(torch.int32)[0, 0, :4] = -1
        part[0, 0, 4:6] = torch.tensor([-0.0, float("inf")])
        parts = [p[:1].to(dtype) for p in parts]
        if not wide:
            parts[rank.size - 1].view(torch.int16)[0, 0, :4] = -1
        reduced = rank.reducer.add_norm(parts[rank.rank], None, x.clone(), None)
        rank.reducer.check()
        expected, _ = reference.add_norm([p[0].float() for p in parts], x, rank.norm, EPS)
        assert bool(reduced.x[0, :4].isnan().all())
        assert not bool(reduced.x[0, 4:].isnan().any())
        assert torch.equal(reduced.x[0, 4:], expected[0, 4:])
        rank.check_empty()
        found.append(digest(reduced.x[:, 4:]))
    return found


def late(memory: PeerMemory, dtype: torch.dtype) -> list[Digest]:
    """The second rank reads its input so late that the others could already be in their next calls."""
    tuning.reduce_programs = lambda rows: 1  # with several, one would wait for the other here
    rank, found = Rank(memory, dtype), []
    for module in (one_shot, two_shot) if rank.rank == 1 else ():
        original = module.sum_of_ranks8

        def reads_late(*arguments: Any, original: Callable[..., Any] = original, **named: Any) -> Any:
            time.sleep(0.5)
            return original(*arguments, **named)

        module.sum_of_ranks8 = reads_late
    for tokens in (1, 1, 1, FEW + 1, FEW + 1):
        x, parts, bias = rank.inputs(tokens)
        norm = Norm(rank.norm, EPS, dtype)
        given = rank.bias(bias, rank.rank)
        reduced = rank.reducer.add_norm(parts[rank.rank].to(dtype), given, x.clone(), norm)
        rank.reducer.check()
        sent = rank.sent([part.to(dtype) for part in parts], bias, tokens)
        rank.check_norm(reduced.normed, reference.add_norm(sent, x, rank.norm, EPS)[1])
        found.append(digest(reduced.normed))
    return found


def absent(memory: PeerMemory, dtype: torch.dtype) -> list[Digest]:
    """The last rank skips the third call: the others return, name the rank, and do not wait again."""
    rank, last = Rank(memory, dtype), memory.size - 1
    for call in range(5):
        tokens = TOKENS if call % 2 else 2
        if rank.rank == last and call == 2:
            return []
        x, parts, _ = rank.inputs(tokens)
        rank.reducer.set_limit(SECONDS if call < 2 else 0.05)
        begin = time.monotonic()
        reduced = rank.reducer.add_norm(parts[rank.rank].to(dtype), None, x, Norm(rank.norm, EPS, dtype))
        if call < 2:
            rank.reducer.check()
            continue
        assert rank.reducer.missing == last, rank.reducer.missing
        with pytest.raises(EngineError, match=f"rank {last} did not take part"):
            rank.reducer.check()
        if call == 2:
            assert bool(reduced.x.isnan().all())  # nothing that could be taken for a result
            check_absent_choices(rank, TOKENS)
        else:
            assert time.monotonic() - begin < SECONDS / 2
    return []


def check_absent_choices(rank: Rank, tokens: int) -> None:
    """Missing choices are NaN, with ids of existing experts, because other kernels count them.

    No rank waits once a rank was absent, so the choices of a rank that is only late may be missing too.
    """
    rows = rank.reducer.own_rows(tokens)
    chosen = torch.full((len(rows), 4), EXPERTS - 1), torch.ones(len(rows), 4)
    ids, gates = rank.reducer.share_choices(*chosen, tokens)
    assert bool(((ids >= 0) & (ids < EXPERTS)).all()), ids
    assert bool(gates[(rank.size - 1) * -(-tokens // rank.size) :].isnan().all())
    assert bool((gates[rows.start : rows.stop] == 1).all())
    assert bool((gates[~gates.isnan()] == 1).all())


SCENARIOS: dict[str, Callable[[PeerMemory, torch.dtype], list[Digest]]] = {
    "few": few_rows,
    "narrow": partial(few_rows, wide=False),
    "many": many_rows,
    "ops": ops_of_the_model,
    "experts": whole_experts,
    "odd": odd_numbers,
    "late": late,
    "absent": absent,
}


# ------------------------------------------------------------------ ranks

DTYPES = (torch.float32, torch.bfloat16)
Case = tuple[str, torch.dtype]


def run(size: int, scenarios: list[str]) -> None:
    cases: dict[Case, list[torch.Tensor]] = {}
    for name in scenarios:
        for dtype in DTYPES:
            words = Layout(size, H, TOKENS, FEW, dtype).num_bytes // 4
            cases[name, dtype] = [torch.zeros(words, dtype=torch.int32).share_memory_() for _ in range(size)]
    barrier = FORK.Barrier(size)

    def work(rank: int, send: Callable[[list[Digest]], None]) -> None:
        original = dict(vars(tuning))
        for (scenario, dtype), buffers in cases.items():
            vars(tuning).update(original)
            addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
            memory = PeerMemory(rank, size, buffers[rank], addresses, lambda: barrier.wait(SECONDS))
            send(SCENARIOS[scenario](memory, dtype))

    on_ranks(size, [f"{name} {dtype}" for name, dtype in cases], work)
