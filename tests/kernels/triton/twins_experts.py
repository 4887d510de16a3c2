"""A rank's whole experts against the reference, op by op. As ``twins.py``: run through
``test_interpreter.py`` or on a GPU.

Memory that no kernel wrote is NaN, or an index that does not exist: a pair of another rank's expert is not
read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from chorale.kernels.ops import ExpertTensors
from chorale.kernels.reference import moe as reference_moe
from chorale.kernels.triton import tuning
from chorale.kernels.triton.moe import grouped, tiles
from chorale.kernels.triton.moe.combine import combine
from chorale.kernels.triton.moe.gemv_kernel import Chosen, _id_of, _pairs, _work_of
from chorale.kernels.triton.moe.packing import Experts, Owned, pack_experts
from chorale.kernels.triton.moe.sort import sort_pairs
from chorale.kernels.triton.ops import TRITON_OPS
from chorale.parallel.shares import cut
from tests.kernels.triton.twins import DEVICE, each_dtype, expert_tensors, randn, route_to
from tests.kernels.triton.twins import check as check_close
from tests.kernels.triton.twins_large import HOPPER, listed, places

EXPERTS = 7
CUT = [tuning.GroupedTile(64, 16, 3, tail=tail, mid=mid) for tail, mid in ((0, 0), (16, 0), (0, 32))]
OWN = [range(4), range(4, 7), range(2, 3)]  # of two ranks, and one expert alone
# (tokens, experts of a token): 4 of 7, none or all of the first rank's, and one expert for all
ROUTES: dict[str, Any] = {
    "any": lambda n: torch.stack([torch.randperm(EXPERTS)[:4] for _ in range(n)]),
    "the-first-rank": lambda n: torch.stack([torch.randperm(4) for _ in range(n)]),
    "the-second-rank": lambda n: torch.stack([4 + torch.randperm(3) for _ in range(n)]),
    "the-same": lambda n: torch.tensor([[5, 0, 4, 2]]).repeat(n, 1),
}


@pytest.fixture(autouse=True)
def _unwritten_memory_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.empty

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        made = original(*args, **options)
        if made.dtype == torch.float8_e4m3fn:
            made.view(torch.uint8).fill_(0x7F)
            return made
        return made.fill_(torch.nan if made.dtype.is_floating_point else 100)

    monkeypatch.setattr(torch, "empty", empty)


def of_rank(tensors: ExpertTensors, own: range) -> tuple[Experts, ExpertTensors]:
    """(packed as a rank's, and its part of the tensors)"""
    names = ("gate_up_bias", "down_bias", "gate_up_blocks", "gate_up_scales", "down_blocks", "down_scales")
    part = replace(tensors, **{name: getattr(tensors, name)[own.start : own.stop] for name in names})
    return replace(pack_experts(part), owned=Owned(own.start, EXPERTS)), part


def local_of(ids: torch.Tensor, own: range) -> torch.Tensor:
    """Counted from the rank's first expert; the last number: another rank's."""
    local = ids - own.start
    return local.masked_fill((local < 0) | (local >= len(own)), len(own))


@pytest.mark.parametrize("pairs", [4, 100, 260, 1100, 4400])
@pytest.mark.parametrize("own", OWN, ids=str)
def test_own_pairs_are_sorted(pairs: int, own: range) -> None:
    torch.manual_seed(pairs)
    ids = torch.randint(0, EXPERTS, (pairs // 4, 4))
    order, offsets = sort_pairs(ids.to(DEVICE), len(own), own.start)
    local = local_of(ids, own).reshape(-1)
    counts = torch.bincount(local, minlength=len(own) + 1)[:-1]
    assert offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    expected = torch.sort(local, stable=True).indices[: int(counts.sum())]
    assert order[: int(offsets[-1])].tolist() == expected.tolist()


@pytest.mark.parametrize("tile", CUT, ids=lambda tile: f"{tile.wide}-{tile.mid}-{tile.tail}")
@pytest.mark.parametrize("tokens", [1, 90, 700])
@pytest.mark.parametrize("own", OWN, ids=str)
def test_own_pairs_get_places_and_tiles(tokens: int, own: range, tile: tuning.GroupedTile) -> None:
    torch.manual_seed(tokens)
    ids = ROUTES["any"](tokens)
    permuted = tiles.permute_pairs(ids.to(DEVICE), len(own), tile, own.start)
    local = local_of(ids, own).reshape(-1)
    mine = local[local < len(own)]
    assert permuted.place.cpu()[local < len(own)].tolist() == places(mine, len(own), tile).tolist()
    assert bool((permuted.place.cpu()[local == len(own)] == -1).all())
    expected = listed(mine, len(own), tile)
    assert int(permuted.tiles[0, 0]) == len(expected)
    assert permuted.tiles[1 : 1 + len(expected), :3].tolist() == expected


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("own", OWN, ids=str)
def test_rows_of_own_pairs_are_copied_and_summed(own: range, route: str) -> None:
    """``gather`` fills the rows of the tiles and no others, ``combine`` reads those of own pairs."""
    hidden, tokens = 160, 40
    torch.manual_seed(1)
    ids, tile = ROUTES[route](tokens), tuning.GroupedTile(32, 16, 3)
    packed, _ = of_rank(expert_tensors(EXPERTS, hidden, 64, torch.float32), own)
    permuted = tiles.permute_pairs(ids.to(DEVICE), len(own), tile, own.start)
    normed, x = randn(tokens, hidden, seed=5), randn(tokens, hidden, seed=6)
    (rows, _), place = grouped.gather(normed, permuted, packed, tile), permuted.place.cpu().long()
    is_own = place >= 0
    used = sum(-(-(last - first) // 16) * 16 for _, first, last in listed_of(permuted))
    filled = int(rows.isfinite().all(1).sum())
    assert filled == used if DEVICE == "cpu" else filled >= used  # only the interpreter's empty memory is NaN
    assert len(place[is_own].unique()) == int(is_own.sum())
    top_k = ids.shape[1]
    gates = torch.softmax(randn(tokens, top_k, seed=7), -1)
    parts = torch.full((permuted.rows, hidden), torch.nan, device=DEVICE)
    own_parts = randn(int(is_own.sum()), hidden, seed=8)
    parts[place[is_own].to(DEVICE)] = own_parts
    found = x.clone()
    combine(parts, permuted.place, gates, found, some=True)
    whole = torch.zeros(top_k * tokens, hidden, device=DEVICE)
    whole[is_own.to(DEVICE)] = own_parts
    expected = (whole.view(tokens, top_k, hidden) * gates.unsqueeze(2)).sum(1)
    torch.testing.assert_close(found - x, expected, rtol=1e-4, atol=1e-5)
    alone = torch.full_like(x, torch.nan)
    combine(parts, permuted.place, gates, alone, some=True, add=False)
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)


def listed_of(permuted: tiles.Permutation) -> list[list[int]]:
    found: list[list[int]] = permuted.tiles[1 : 1 + int(permuted.tiles[0, 0]), :3].tolist()
    return found


@each_dtype
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
def test_a_rank_adds_its_experts(tokens: int, route: str, dtype: torch.dtype) -> None:
    """Ranks that no pair is routed to, too: they add nothing. Together they add what one rank adds."""
    hidden, inter = 160, 96
    torch.manual_seed(tokens)
    ids, tensors = ROUTES[route](tokens).to(DEVICE), expert_tensors(EXPERTS, hidden, inter, dtype)
    check_ranks(ids, tensors, 2, dtype)


def check_ranks(ids: torch.Tensor, tensors: ExpertTensors, ranks: int, dtype: torch.dtype) -> None:
    total = torch.zeros(len(ids), tensors.down_bias.shape[1], device=DEVICE)
    routed = route_to(ids, randn(*total.shape, seed=5).to(dtype))
    wide = routed._replace(normed=routed.normed.float())
    for own in cut(EXPERTS, ranks, 1, "experts"):
        packed, part = of_rank(tensors, own)
        found = TRITON_OPS.moe(routed, packed, torch.zeros_like(total), None, 1e-5)[0]
        local = wide._replace(expert_ids=local_of(ids, own))
        expected = reference_moe.moe(local, reference_moe.pack_experts(part), torch.zeros_like(total))
        is_without = (local_of(ids, own) == len(own)).all(1)
        assert bool((found[is_without] == 0).all())
        assert bool((expected[~is_without].norm(dim=1) > 0).all())
        check_close(found, expected, dtype)
        total += found
    alone = reference_moe.pack_experts(tensors)
    check_close(total, reference_moe.moe(wide, alone, torch.zeros_like(total)), dtype)


@pytest.mark.skipif(DEVICE != "cuda", reason="their loop is PTX: see test_gemv_ptx.py")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16, 17, 25])
def test_streamed_products(tokens: int, route: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chorale.kernels.triton.moe.moe.can_use_grouped", lambda *_: False)
    monkeypatch.setattr(tuning, "GEMV_PAIRS_EACH", 100)
    torch.manual_seed(tokens)
    tensors = expert_tensors(EXPERTS, 320, 192, torch.bfloat16)
    check_ranks(ROUTES[route](tokens).to(DEVICE), tensors, ranks, torch.bfloat16)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("tokens", [17, 64, 600, 1030])
def test_grouped_products(tokens: int, route: str, ranks: int) -> None:
    torch.manual_seed(tokens)
    tensors = expert_tensors(EXPERTS, 192, 352, torch.bfloat16)
    check_ranks(ROUTES[route](tokens).to(DEVICE), tensors, ranks, torch.bfloat16)


@triton.jit
def _own_work_kernel(
    ids_ptr, order_ptr, offsets_ptr, out_ptr, num_tokens, first_expert, further, E,
    K: tl.constexpr, PAIRS: tl.constexpr, BY_PAIR: tl.constexpr, SORTED: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """What ``gemv_kernel``'s products do before and after their loop: [programs, pairs] int32."""
    lane, program = tl.arange(0, 8), tl.program_id(0)
    expert, first, last = _work_of(
        ids_ptr, offsets_ptr, program, num_tokens * K, first_expert, further, E, PAIRS, BY_PAIR, SORTED, 1,
        EXPERTS,
    )  # fmt: skip
    chosen = Chosen(ids_ptr, order_ptr, num_tokens, _id_of(expert, first_expert), last)
    for begin in range(first, last, 8):
        pairs = _pairs(chosen, lane, begin, K, SORTED, 1)[0]
        place = out_ptr + program * num_tokens * K + pairs
        tl.store(place, expert + pairs * 0, mask=pairs >= 0)


@pytest.mark.parametrize("own", OWN, ids=str)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("tokens", "by_pair", "is_sorted"),
    [(1, True, False), (2, True, False), (8, False, False), (30, False, True)],
)
def test_programs_that_stream_take_own_pairs(
    tokens: int, by_pair: bool, is_sorted: bool, route: str, own: range
) -> None:
    """Each own pair is one program's, with its expert; the others are nobody's."""
    torch.manual_seed(tokens)
    ids = ROUTES[route](tokens)
    pairs, given = ids.numel(), ids.to(DEVICE)
    order, offsets = sort_pairs(given, len(own), own.start) if is_sorted else (given, given)
    further = pairs // 8 if is_sorted else 0
    programs = pairs if by_pair else further + len(own)
    out = torch.full((programs, pairs), 99, dtype=torch.int32, device=DEVICE)
    _own_work_kernel[(programs,)](
        given, order, offsets, out, tokens, None if is_sorted else own.start, further, len(own),
        K=ids.shape[1], PAIRS=0 if is_sorted or tokens == 1 else 64, BY_PAIR=by_pair, SORTED=is_sorted,
        EXPERTS=triton.next_power_of_2(len(own)),
    )  # fmt: skip
    local = local_of(ids, own).reshape(-1)
    assert ((out != 99).sum(0).cpu() == (local < len(own)).int()).all()
    assert out.amin(0).cpu().tolist() == [n if n < len(own) else 99 for n in local.tolist()]
