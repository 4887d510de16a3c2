"""Expert layers of many pairs against the reference. Run as ``twins.py`` is.

What the interpreter can run is tested everywhere: placing, gathering, combining. The products are Gluon for
Hopper; there the whole layer is compared, in bfloat16, at sizes that are no multiple of any tile.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from chorale.kernels import mxfp4
from chorale.kernels.ops import ExpertTensors, Routed
from chorale.kernels.reference import moe as reference_moe
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.norm import Norm
from chorale.kernels.triton.moe import grouped, tiles
from chorale.kernels.triton.moe.combine import combine
from chorale.kernels.triton.moe.packing import Experts, fragment_columns, pack_experts
from tests.kernels.triton.twins import CHOICES, DEVICE, check, check_norm, expert_tensors, randn, route_to

HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)


def ids_of_counts(counts: list[int]) -> torch.Tensor:
    """[T, 4] int64: so many pairs of each expert, shuffled; the last gets what is missing to whole rows."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = torch.nn.functional.pad(ids, (0, -len(ids) % 4), value=len(counts) - 1)
    return ids[torch.randperm(len(ids))].view(-1, 4)


def edges(tile: tuning.GroupedTile) -> list[int]:
    """Counts of pairs where an expert's cut changes: none, a tail of 1, a full one, one too many, one after
    several wide tiles, a lone remainder that is no tail, what fits neither, and around a mid tile."""
    wide, mid, narrow, tail = tile.wide, tile.mid, tile.narrow, tile.tail
    sizes = [wide + tail, 0, 1, wide, wide + 1, wide + tail + 1, 3 * wide + tail, 2 * wide + 1, tail]
    sizes += [2 * wide, wide + narrow, wide + narrow + 1, wide - 1, 3 * wide + max(tail, narrow) + 1]
    return [*sizes, mid, mid + 1, wide + mid, 2 * wide + mid + narrow, wide + mid + narrow + 1, 0]


def cut(count: int, tile: tuning.GroupedTile) -> list[int]:
    """An expert's tiles by what they hold."""
    full, rest = divmod(count, tile.wide)
    wides = [tile.wide] * full
    if full and 0 < rest <= tile.tail:
        return [*wides[1:], tile.wide + rest]
    if tile.narrow < tile.mid < rest <= tile.mid + tile.narrow and tile.mid < tile.wide:
        return [*wides, tile.mid, rest - tile.mid]
    return [*wides, rest] if rest else wides


def kind(pairs: int, tile: tuning.GroupedTile) -> int:
    """The order of the list: with a tail, wide, mid, narrow."""
    bounds = (tile.wide, tile.middle or tile.narrow, tile.narrow)
    return next((number for number, bound in enumerate(bounds) if pairs > bound), 3)


def size(pairs: int, tile: tuning.GroupedTile) -> int:
    """Places of the tile that holds so many pairs."""
    sizes = (tile.wide + tile.tail, tile.wide, tile.middle or tile.wide, tile.narrow)
    return sizes[kind(pairs, tile)]


def listed(ids: torch.Tensor, experts: int, tile: tuning.GroupedTile) -> list[list[int]]:
    """The list of tiles: by kind, then expert, then place. Not where wide ones are no larger than narrow."""
    found, first = [], 0
    for expert, count in enumerate(torch.bincount(ids.reshape(-1), minlength=experts).tolist()):
        for pairs in cut(count, tile):
            found.append([expert, first, first + pairs])
            first += size(pairs, tile)
    return sorted(found, key=lambda entry: kind(entry[2] - entry[1], tile))


def places(ids: torch.Tensor, experts: int, tile: tuning.GroupedTile) -> torch.Tensor:
    """Where each pair is, by the list: an expert's in the order of its tiles."""
    ids, found = ids.reshape(-1), torch.full((ids.numel(),), -1)
    entries = sorted(listed(ids, experts, tile), key=lambda entry: entry[1])
    for expert in range(experts):
        mine = [torch.arange(first, last) for owner, first, last in entries if owner == expert]
        if mine:
            found[ids == expert] = torch.cat(mine)
    return found


CUTS = [
    *[tuning.GroupedTile(64, narrow, 3, tail=tail) for narrow, tail in ((16, 0), (16, 16), (32, 16))],
    *[tuning.GroupedTile(32, narrow, 3, tail=tail) for narrow, tail in ((16, 32), (32, 0), (32, 16))],
    *[tuning.GroupedTile(wide, 16, 3, mid=32) for wide in (64, 128, 32)],  # the last has none
    tuning.GroupedTile(64, 32, 3, mid=32),
    tuning.GroupedTile(16, 8, 3, tail=8),
    tuning.GroupedTile(64, 8, 3, mid=16),
    tuning.GroupedTile(64, 32, 3, mid=48),
]


@pytest.mark.parametrize("tile", CUTS, ids=lambda tile: f"{tile.wide}-{tile.mid}-{tile.narrow}-{tile.tail}")
@pytest.mark.parametrize(
    ("tokens", "experts", "choose"),
    [
        (1, 7, "any"),
        (90, 7, "some-empty"),
        (70, 20, "all-the-same"),
        (50, 70, "any"),
        (0, 20, "edges"),
        (0, 80, "two-left"),
    ],
)
def test_slots_are_placed_and_cut(tokens: int, experts: int, choose: str, tile: tuning.GroupedTile) -> None:
    torch.manual_seed(tokens)
    if choose == "edges":
        ids = ids_of_counts(edges(tile))
    elif choose == "two-left":  # the longest list for its pairs
        ids = ids_of_counts([tile.mid + 1] * experts)
    else:
        ids = CHOICES[choose](tokens, experts)
    check_placing(ids, experts, tile)


def check_placing(ids: torch.Tensor, experts: int, tile: tuning.GroupedTile) -> None:
    permuted, expected = tiles.permute_pairs(ids.to(DEVICE), experts, tile), listed(ids, experts, tile)
    assert torch.equal(permuted.place.cpu().long(), places(ids, experts, tile))
    assert int(permuted.tiles[0, 0]) == len(expected) < len(permuted.tiles)
    entries = permuted.tiles[1 : 1 + len(expected), :3].tolist()
    if tile.wide == tile.narrow:  # then their order says nothing
        entries, expected = sorted(entries), sorted(expected)
    assert entries == expected
    assert max(first + size(last - first, tile) for _, first, last in expected) <= permuted.rows


def popular(pairs: int, experts: int) -> torch.Tensor:
    """Some experts have most pairs, and the last ones perhaps none."""
    return (torch.rand(pairs, 1) ** 3 * experts).long()


SPREADS = {
    "even": lambda pairs, experts: torch.randint(experts, (pairs, 1)),
    "popular": popular,
    "first": lambda pairs, _: torch.zeros(pairs, 1, dtype=torch.int64),
    "last": lambda pairs, experts: torch.full((pairs, 1), experts - 1),
}
ONCE, PROGRAMS = tuning.PERMUTE_AT_ONCE, tuning.PERMUTE_PROGRAMS


@pytest.mark.parametrize(
    ("spread", "each"),
    [("even", 10), ("popular", 50), ("even", 100), ("popular", 1000), ("first", 100), ("last", 1000)],
)
@pytest.mark.parametrize(
    ("pairs", "experts"),
    [
        *[(511, 7), (512, 32), (513, 128), (1000, 20), (1024, 128), (1025, 32), (ONCE - 1, 128), (ONCE, 32)],
        *[(ONCE + 1, 128), (5000, 20), (64 * PROGRAMS, 128), (64 * PROGRAMS + 1, 7)],
        *[(128 * PROGRAMS + 1, 32), (256 * PROGRAMS + 1, 128)],  # the last: more than 32 groups
    ],
)
def test_every_form_of_placing(pairs: int, experts: int, spread: str, each: int) -> None:
    """Numbers of pairs where the form, or a block of it, changes; ``each`` chooses the tile."""
    torch.manual_seed(pairs)
    check_placing(SPREADS[spread](pairs, experts), experts, tuning.grouped(each, experts))


@pytest.mark.parametrize(
    "tile",
    [
        tuning.GroupedTile(32, 16, 3),
        tuning.GroupedTile(16, 8, 3, tail=8),
        tuning.GroupedTile(64, 8, 3, mid=16),
    ],
    ids=lambda tile: f"{tile.wide}-{tile.mid}-{tile.narrow}-{tile.tail}",
)
@pytest.mark.parametrize("hidden", [160, 192])
def test_gathered_rows_are_in_fragment_order_and_padded(hidden: int, tile: tuning.GroupedTile) -> None:
    tokens, experts = 37, 9
    packed = pack_experts(expert_tensors(experts, hidden, 96, torch.float32))
    ids = CHOICES["any"](tokens, experts)
    normed = randn(tokens, hidden)
    permuted = tiles.permute_pairs(ids.to(DEVICE), experts, tile)
    found = grouped.gather(normed, permuted, packed, tile)[0].cpu()
    assert found.shape == (permuted.rows, 192)
    owned = torch.zeros(permuted.rows, dtype=torch.bool)
    owned[permuted.place.cpu().long()] = True
    ends = permuted.tiles[1 : 1 + int(permuted.tiles[0, 0]), 1:3].tolist()
    for first, last in ends:
        left_out = found[last : first + size(last - first, tile)]
        assert not bool(owned[last : first + size(last - first, tile)].any())
        assert bool((left_out == 0).all())
    padded = torch.nn.functional.pad(normed.cpu(), (0, 192 - hidden)).view(tokens, 3, 64)
    expected = padded[:, :, fragment_columns()].view(tokens, 192).repeat_interleave(4, 0)
    assert torch.equal(found[permuted.place.cpu().long()], expected)


@pytest.mark.parametrize("hidden", [200, 201])
def test_combining_sums_in_float32(hidden: int) -> None:
    tokens = 23
    ids = CHOICES["any"](tokens, 9)
    permuted = tiles.permute_pairs(ids.to(DEVICE), 9, tuning.GroupedTile(32, 16, 3))
    place = permuted.place
    parts, gates, x = randn(permuted.rows, hidden), randn(tokens, 4, seed=1), randn(tokens, hidden, seed=2)
    chosen = parts[place.long()].view(tokens, 4, hidden).double()
    expected = x.double() + (chosen * gates.double()[:, :, None]).sum(1)
    alone = x.clone()
    assert combine(parts, place, gates, alone) is None
    check(alone, expected, torch.float32)
    x[5, 0] = torch.nan
    keep = [row for row in range(tokens) if row != 5]
    for dtype in (torch.float32, torch.bfloat16):
        norm, found = Norm(1 + randn(hidden, seed=3) / 4, 1e-5, dtype), x.clone()
        normed = combine(parts, place, gates, found, norm)
        assert normed is not None
        assert torch.equal(found[keep], alone[keep])
        check_norm(normed[keep], found[keep], norm)
        assert bool(normed[5].isnan().all())


def test_gathering_with_a_fixed_scale_saturates() -> None:
    """In numbers that e4m3 has, because the interpreter rounds others wrongly (``twins_e4m3.py``)."""
    tokens, hidden, scale = 5, 160, 0.25
    ids = CHOICES["any"](tokens, 9).to(DEVICE)
    tile = tuning.GroupedTile(32, 16, 3)
    permuted = tiles.permute_pairs(ids, 9, tile)
    codes = torch.arange(tokens * hidden, dtype=torch.int64).to(torch.uint8).view(torch.float8_e4m3fn).float()
    x = (torch.where(codes.isnan(), 3.0, codes) * scale).view(tokens, hidden).to(DEVICE)
    x[1, 7], x[2, 9] = 1e6, -300.0
    packed = pack_experts(expert_tensors(9, hidden, 96, torch.float32))
    packed = dataclasses.replace(packed, gate_up_input_scale=scale)
    found, scales = grouped.gather(x, permuted, packed, tile, fp8=True)
    assert scales is not None
    place = permuted.place.long()
    assert bool((scales[place] == scale).all())
    columns = grouped_columns(found.shape[1])
    expected = torch.nn.functional.pad(x / scale, (0, found.shape[1] - hidden)).clamp(-448, 448)[:, columns]
    assert torch.equal(found.float()[place], expected.repeat_interleave(4, 0))
    for _, first, last in permuted.tiles[1 : 1 + int(permuted.tiles[0, 0]), :3].tolist():
        assert bool((found[last : first + size(last - first, tile)].float() == 0).all())


def added(routed: Routed, experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """The new x, the same with the next layer's norm and without."""
    alone, found, norm = x.clone(), x.clone(), Norm(torch.ones_like(x[0]), 1e-5, torch.bfloat16)
    assert grouped.grouped_moe(routed, experts, alone) is None
    ahead = grouped.grouped_moe(routed, experts, found, norm)
    assert ahead is not None
    check_norm(ahead, found, norm)
    assert torch.equal(alone, found)
    return found


def grouped_columns(width: int) -> torch.Tensor:
    """``grouped_moe.column8_of`` of each place."""
    place = torch.arange(width, device=DEVICE)
    return place // 64 * 64 + place // 4 % 4 * 16 + place % 64 // 16 * 4 + place % 4


def fp8_layer(routed: Routed, tensors: ExpertTensors) -> torch.Tensor:
    """The layer in float32 but for the inputs of its products, rounded to e4m3."""

    def rounded(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    assert tensors.gate_up_blocks is not None
    assert tensors.gate_up_scales is not None
    assert tensors.down_blocks is not None
    assert tensors.down_scales is not None
    normed, ids, gates = routed
    x, limit = normed.float(), tensors.swiglu_limit
    x = rounded(x, tensors.gate_up_input_scale or x.abs().amax(1, keepdim=True) / 448)
    inner_scale = tensors.down_input_scale or limit * (limit + 1) / 448
    out = torch.zeros_like(x)
    for expert in range(tensors.down_bias.shape[0]):
        token, k = (ids == expert).nonzero(as_tuple=True)
        gate_up = mxfp4.dequantize(
            tensors.gate_up_blocks[expert], tensors.gate_up_scales[expert], torch.float32
        )
        down = mxfp4.dequantize(tensors.down_blocks[expert], tensors.down_scales[expert], torch.float32)
        both = x[token] @ gate_up.t() + tensors.gate_up_bias[expert].bfloat16().float()
        gate, up = both[:, 0::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
        inner = gate * torch.sigmoid(tensors.swiglu_alpha * gate) * (up + 1)
        result = rounded(inner, inner_scale) @ down.t()
        result += tensors.down_bias[expert].bfloat16().float()
        out.index_add_(0, token, result * gates[token, k][:, None])
    return out


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    "shape",
    [
        (256, 64, 3),
        (256, 64, 2, 0, 1, 32),
        (256, 64, 3, 0, 1, 0, 128),
        (128, 32, 5),
        (128, 32, 4, 0, 1, 32),
        (64, 32, 4, 80, 2),
        (16, 8, 3, 80, 3, 0, 0, 4, 3),
        (16, 8, 3, 64, 4, 0, 0, 4, 3, False),
        (32, 16, 2, 64, 4, 0, 0, 4, 3, False),
        (64, 32, 3, 120, 2, 0, 0, 4, 3),
    ],
)
@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize(("tokens", "hidden", "inter"), [(65, 160, 96), (300, 192, 352), (1030, 2880, 2880)])
def test_grouped_moe(
    tokens: int,
    hidden: int,
    inter: int,
    choose: str,
    shape: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(tokens)
    experts = 7
    ids = CHOICES[choose](tokens, experts).to(DEVICE)
    tensors = expert_tensors(experts, hidden, inter, torch.bfloat16)
    packed = pack_experts(tensors)
    routed, x = route_to(ids, randn(tokens, hidden, seed=5).bfloat16()), randn(tokens, hidden, seed=6)
    monkeypatch.setattr(tuning, "grouped", lambda *_, fp8: tuning.GroupedTile(*shape))
    found = added(routed, packed, x)
    expected = reference_moe.moe(routed, reference_moe.pack_experts(tensors), x.clone())
    check(found - x, expected - x, torch.bfloat16)
    assert torch.equal(found, added(routed, packed, x))


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("scales", [(None, None), (0.004, 0.006)], ids=["ours", "the-checkpoint's"])
@pytest.mark.parametrize(
    "shape",
    [
        (256, 64, 5),
        (256, 64, 5, 0, 1, 32),
        (256, 64, 5, 0, 1, 0, 128),
        (128, 32, 8),
        (128, 32, 7, 0, 1, 32),
        (64, 32, 5, 80, 2),
    ],
)
@pytest.mark.parametrize(("tokens", "hidden", "inter"), [(65, 160, 96), (300, 192, 352), (1030, 2880, 2880)])
def test_grouped_moe_in_fp8(
    tokens: int,
    hidden: int,
    inter: int,
    shape: tuple[int, ...],
    scales: tuple[float | None, float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within 1 % of the same arithmetic (a rounding that falls the other way is 6 % of one input)."""
    experts = 7
    torch.manual_seed(tokens)
    ids = CHOICES["any"](tokens, experts).to(DEVICE)
    tensors = expert_tensors(experts, hidden, inter, torch.bfloat16)
    tensors = dataclasses.replace(tensors, gate_up_input_scale=scales[0], down_input_scale=scales[1])
    packed = pack_experts(dataclasses.replace(tensors, fp8_activations=True))
    monkeypatch.setattr(tuning, "E4M3_FROM", 0)
    routed, x = route_to(ids, randn(tokens, hidden, seed=5).bfloat16()), randn(tokens, hidden, seed=6)
    monkeypatch.setattr(tuning, "grouped", lambda *_, fp8: tuning.GroupedTile(*shape))
    found = added(routed, packed, x)
    check(found - x, fp8_layer(routed, tensors), torch.bfloat16)
    for _ in range(5):
        assert torch.equal(found, added(routed, packed, x))


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(
    "tile",
    [
        *[tuning.GroupedTile(256, 64, 2, tail=tail) for tail in (0, 16, 32, 64)],
        *[tuning.GroupedTile(128, 32, 3, tail=tail) for tail in (0, 16, 32, 64)],
        *[tuning.GroupedTile(256, narrow, 3, mid=128) for narrow in (32, 64)],
        tuning.GroupedTile(128, 32, 4, mid=64),
        tuning.GroupedTile(32, 16, 6, registers=80, programs=2),
        tuning.GroupedTile(16, 8, 6, registers=80, programs=2, tail=8),
    ],
    ids=lambda tile: f"{tile.wide}-{tile.mid}-{tile.narrow}-{tile.tail}",
)
@pytest.mark.parametrize(("hidden", "inter"), [(192, 352), (2880, 2880)])
def test_every_kind_of_tile(
    hidden: int, inter: int, tile: tuning.GroupedTile, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pair is held against the reference by itself: a row of ids is one token's, each of weight 1."""
    torch.manual_seed(tile.tail)
    counts = edges(tile)
    ids = ids_of_counts(counts).view(-1, 1).to(DEVICE)
    tensors = expert_tensors(len(counts), hidden, inter, torch.bfloat16)
    packed = pack_experts(dataclasses.replace(tensors, fp8_activations=fp8))
    normed, x = randn(len(ids), hidden, seed=5).bfloat16(), torch.zeros(len(ids), hidden, device=DEVICE)
    routed = Routed(normed, ids, torch.ones(len(ids), 1, device=DEVICE))
    monkeypatch.setattr(tuning, "grouped", lambda *_, fp8: tile)
    monkeypatch.setattr(tuning, "E4M3_FROM", 0)
    found = added(routed, packed, x)
    if fp8:
        expected = fp8_layer(routed, tensors)
    else:
        expected = reference_moe.moe(routed, reference_moe.pack_experts(tensors), x.clone())
    check(found, expected, torch.bfloat16)
    rows = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(rows.max()) < 0.1, (int(rows.argmax()), ids[rows.argmax()])
    for _ in range(5):
        assert torch.equal(found, added(routed, packed, x))
