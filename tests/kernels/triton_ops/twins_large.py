"""Expert layers of many slots against the reference. Run as ``twins.py`` is.

What the interpreter can run is tested everywhere: placing, gathering, combining. The products are Gluon for
Hopper; there the whole layer is compared, in bfloat16, at sizes that are no multiple of any tile.
"""

from __future__ import annotations

import pytest
import torch
from twins import CHOICES, DEVICE, check, expert_tensors, randn

from chorale.kernels import reference_moe
from chorale.kernels.triton import moe_large, tuning
from chorale.kernels.triton.experts import fragment_columns, pack_experts

HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize(("wide", "narrow"), [(64, 16), (32, 32)])
@pytest.mark.parametrize(
    ("tokens", "experts", "choose"), [(1, 7, "any"), (90, 7, "some-empty"), (70, 20, "all-the-same")]
)
def test_slots_are_placed_and_cut(tokens: int, experts: int, choose: str, wide: int, narrow: int) -> None:
    torch.manual_seed(tokens)
    ids = CHOICES[choose](tokens, experts)
    placed = moe_large.place_slots(ids.to(DEVICE), experts, wide, narrow)
    order = torch.sort(ids.reshape(-1), stable=True).indices
    assert torch.equal(placed.place.cpu().long()[order], torch.arange(tokens * 4))
    owner = torch.full((tokens * 4,), -1)
    entries = placed.tiles[1 : 1 + int(placed.tiles[0, 0]), :3].tolist()
    for expert, first, last in entries:
        assert 0 <= first < last <= first + wide
        assert bool((owner[first:last] == -1).all())
        owner[first:last] = expert
    assert torch.equal(owner, ids.reshape(-1)[order])
    is_narrow = [last - first <= narrow for _, first, last in entries]
    assert is_narrow == sorted(is_narrow)  # at the end
    narrow_ones = [expert for expert, first, last in entries if last - first <= narrow]
    assert wide == narrow or len(set(narrow_ones)) == len(narrow_ones)


@pytest.mark.parametrize("hidden", [160, 192])
def test_gathered_rows_are_in_fragment_order_and_padded(hidden: int) -> None:
    tokens, experts = 37, 9
    packed = pack_experts(expert_tensors(experts, hidden, 96, torch.float32))
    ids = CHOICES["any"](tokens, experts)
    normed = randn(tokens, hidden)
    placed = moe_large.place_slots(ids.to(DEVICE), experts, 32, 16)
    found = moe_large.gather(normed, placed.place, packed).cpu()
    assert found.shape == (tokens * 4, 192)
    padded = torch.nn.functional.pad(normed.cpu(), (0, 192 - hidden)).view(tokens, 3, 64)
    expected = padded[:, :, fragment_columns()].view(tokens, 192).repeat_interleave(4, 0)
    assert torch.equal(found[placed.place.cpu().long()], expected)


def test_combining_sums_in_float32() -> None:
    tokens, hidden = 23, 200
    ids = CHOICES["any"](tokens, 9)
    place = moe_large.place_slots(ids.to(DEVICE), 9, 32, 16).place
    parts, gates, x = randn(tokens * 4, hidden), randn(tokens, 4, seed=1), randn(tokens, hidden, seed=2)
    chosen = parts[place.long()].view(tokens, 4, hidden).double()
    expected = x.double() + (chosen * gates.double()[:, :, None]).sum(1)
    check(moe_large.combine(parts, place, gates, x.clone()), expected, torch.float32)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("shape", [(256, 64, 3), (128, 32, 5), (64, 32, 8)])
@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize(("tokens", "hidden", "inter"), [(65, 160, 96), (300, 192, 352), (1030, 2880, 2880)])
def test_moe_large(
    tokens: int,
    hidden: int,
    inter: int,
    choose: str,
    shape: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(tokens)
    experts = 7
    ids = CHOICES[choose](tokens, experts).to(DEVICE)
    tensors = expert_tensors(experts, hidden, inter, torch.bfloat16)
    packed = pack_experts(tensors)
    normed, x = randn(tokens, hidden, seed=5).bfloat16(), randn(tokens, hidden, seed=6)
    gates = torch.softmax(randn(tokens, 4, seed=7), -1)
    monkeypatch.setattr(tuning, "large", lambda _: tuning.LargeTile(*shape))
    found = moe_large.moe_large(normed, ids, gates, packed, x.clone())
    expected = reference_moe.moe(normed, ids, gates, reference_moe.pack_experts(tensors), x.clone())
    check(found - x, expected - x, torch.bfloat16)
    assert torch.equal(found, moe_large.moe_large(normed, ids, gates, packed, x.clone()))
