"""The Triton kernels around the model, against the runtime's plain torch. As ``twins.py``: run through
``test_step_interpreter.py`` or on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chorale.engine.types import EARLY_STOPS, EngineLimits, RowStart, SamplingSpec
from chorale.kernels.ops import (
    NO_FINITE_LOGITS,
    NOTHING_ALLOWED,
    Allowed,
    DecodeInputs,
    DecodeState,
    SamplingInputs,
)
from chorale.kernels.reference.sampling import decode_inputs as reference
from chorale.kernels.reference.sampling.noise import row_keys
from chorale.kernels.reference.sampling.sampling import ReferenceSampler
from chorale.kernels.triton.sampling.decode_inputs import decode_inputs
from chorale.kernels.triton.sampling.sample import make_sampler, sample
from chorale.machine.hardware import Hardware
from chorale.runtime.device import CpuDevice, open_device
from chorale.runtime.sampling.row_state import RowSamplingState
from chorale.runtime.sampling.sampler import Sampler
from chorale.runtime.steps.buffers import Buffers
from tests.kernels.triton.twins import DEVICE

CPU = CpuDevice(Hardware("cpu", "test", 2**34, 2**34), sample_rows=4)


def allowed_of(masks: dict[int, set[int]], count: int, vocab: int) -> Allowed:
    """``masks``: row -> the tokens that it may have."""
    index, bits = torch.full((count,), -1, dtype=torch.int32), np.zeros((len(masks), vocab + 64), np.uint8)
    for place, (row, tokens) in enumerate(masks.items()):
        index[row] = place
        bits[place, sorted(tokens)] = 1
    return Allowed(index.to(DEVICE), torch.from_numpy(np.packbits(bits, 1, bitorder="little")).to(DEVICE))


def early_stops(stops: dict[int, list[int]], count: int) -> torch.Tensor:
    """``stops``: row -> the ids that it may not have yet."""
    found = torch.full((count, EARLY_STOPS), -1, dtype=torch.int32)
    for row, tokens in stops.items():
        found[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return found


def draw_both(
    logits: torch.Tensor,
    temperature: list[float],
    forbidden: tuple[int, ...] = (),
    masks: dict[int, set[int]] | None = None,
    filters: torch.Tensor | None = None,
    stops: dict[int, list[int]] | None = None,
) -> tuple[list[int], list[int], list[int]]:
    """(the kernel's tokens, plain torch's, what the kernel left for the next step)."""
    count, vocab = logits.shape
    keys = torch.from_numpy(row_keys(np.arange(count, dtype=np.uint64), np.arange(count) + 9))
    rows = torch.arange(count - 1, -1, -1, dtype=torch.int32)
    heat = torch.tensor(temperature)
    sampler = Sampler(CPU, vocab, forbidden)
    theirs, last = torch.zeros(count, dtype=torch.int64), torch.zeros(count + 1, dtype=torch.int64)
    seen = logits.clone()
    for row, tokens in (masks or {}).items():
        out = torch.ones(vocab, dtype=torch.bool)
        out[sorted(tokens)] = False
        seen[row, out & seen[row].isfinite()] = -1e30  # finite, or the row would be broken
    early = None if stops is None else early_stops(stops, count)
    sampler.draw(seen, SamplingInputs(keys, heat, rows, filters, early_stops=early), last, theirs)
    ours, ours_last = torch.full_like(theirs, 99).to(DEVICE), torch.full_like(last, 99).to(DEVICE)
    strided = keys.t().contiguous().t().to(DEVICE)  # as in the columns of a step
    allowed = None if masks is None else allowed_of(masks, count, vocab)
    columns = None if filters is None else filters.to(DEVICE)
    strided_stops = None if early is None else early.t().contiguous().t().to(DEVICE)
    draws = SamplingInputs(strided, heat.to(DEVICE), rows.to(DEVICE), columns, allowed, strided_stops)
    sample(sampler.forbidden.to(DEVICE), logits.to(DEVICE), draws, ours_last, ours)
    assert int(ours_last[count]) == 99
    return ours.tolist(), theirs.tolist(), ours_last[rows.long()].tolist()


@pytest.mark.parametrize("vocab", [37, 1024, 5000])
@pytest.mark.parametrize("count", [1, 8, 9])
def test_sampling(count: int, vocab: int) -> None:
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(count)) * 3
    heat = [(row % 3) * 0.7 for row in range(count)]
    best = int(logits[0].argmax())
    ours, theirs, last = draw_both(logits, heat, (best, vocab - 1))
    assert ours == theirs
    assert last == ours
    assert ours[0] != best


def test_equal_logits_go_to_the_first() -> None:
    logits = torch.zeros(2, 3000)
    logits[:, [700, 1500, 2900]] = 1.0
    assert draw_both(logits, [0.0, 0.0])[0] == [700, 700]


def test_rows_without_a_token() -> None:
    logits = torch.randn(6, 2050)
    logits[1, 2049] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4, 5:] = -torch.inf  # what is left is forbidden
    ours, theirs, last = draw_both(logits, [1.0] * 6, (0, 1, 2, 3, 4))
    assert ours == theirs
    assert ours[1:5] == [NO_FINITE_LOGITS] * 3 + [NOTHING_ALLOWED]
    assert min(ours[0], ours[5]) >= 0
    assert min(last) >= 0


@pytest.mark.slow
def test_noise_is_resolved_in_its_tail() -> None:
    """Rare tokens win by large noise: of equal logits each of 20,000 is the largest of 64 draws alike."""
    logits = torch.zeros(64, 20_000)
    ours, theirs, _ = draw_both(logits, [1.0] * 64)
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 63
    assert len(set(ours)) > 58


@pytest.mark.parametrize("vocab", [37, 5000])
@pytest.mark.parametrize("filtered", [False, True])
def test_only_tokens_that_the_grammar_allows_are_sampled(vocab: int, filtered: bool) -> None:
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    best = logits.argmax(1).tolist()
    masks = {1: {3, 7, 8, 20}, 2: set(range(vocab)) - {best[2]}, 4: {vocab - 1}, 5: {0}, 6: set()}
    filters = torch.tensor([[5.0, 0.9, 0.05]]).repeat(7, 1) if filtered else None
    ours, theirs, _ = draw_both(logits, [0.0, 0.8, 0.0, 0.5, 1.0, 0.0, 0.9], (0,), masks, filters)
    assert ours[:5] == theirs[:5]
    assert ours[1] in masks[1]
    assert ours[0] == best[0] or best[0] == 0
    assert ours[2] != best[2]
    assert ours[4] == vocab - 1
    assert ours[5:] == [NOTHING_ALLOWED] * 2  # the only one that is allowed is forbidden; none is allowed


@pytest.mark.parametrize("vocab", [37, 5000])
@pytest.mark.parametrize("filtered", [False, True])
def test_early_stop_ids_are_not_sampled(vocab: int, filtered: bool) -> None:
    """Of rows that would have their best id, those that may not have it yet get another one."""
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    order = logits.argsort(1, descending=True)
    stops = {1: order[1, :EARLY_STOPS].tolist(), 2: [int(order[2, 0])], 4: order[4, :2].tolist(), 5: [vocab]}
    filters = torch.tensor([[2.0, 1.0, 0.0]]).repeat(6, 1) if filtered else None
    masks = {4: set(order[4, :3].tolist())}
    for heat in ([0.0] * 6, [0.01] * 6):
        ours, theirs, _ = draw_both(logits, heat, (), masks, filters, stops)
        assert ours == theirs
        assert ours[0] == order[0, 0]
        assert ours[1] not in stops[1]
        assert ours[2] != order[2, 0]
        assert ours[4] == order[4, 2]
        assert ours[5] == order[5, 0]


def test_sampler_with_grammars_equals_plain_torch() -> None:
    """A batch in which some rows have a grammar, one has edits, and one has both."""
    specs = [
        SamplingSpec(temperature=0.8, seed=row, logit_bias={5: 3.0} if row > 3 else {}) for row in range(6)
    ]
    rows = RowSamplingState(6, 96, 64, torch.device(DEVICE))
    for row, spec in enumerate(specs):
        rows.start(RowStart(row, np.array([1, 2], np.int32), 2, spec, row, (95,)))
    device = CPU if DEVICE == "cpu" else open_device(DEVICE, 1)
    buffers = Buffers(device, EngineLimits(10, 16, 6, 64, 64, vocab_size=96))
    buffers.rows = rows
    batch = buffers.sampling_of(np.arange(6, dtype=np.int32), np.full(6, 3))
    octets = np.random.default_rng(0).integers(0, 256, (3, 12)).astype(np.uint8)
    index = torch.tensor([-1, 0, -1, 1, -1, 2], dtype=torch.int32, device=DEVICE)
    batch = batch.with_grammars(Allowed(index, torch.from_numpy(octets).to(DEVICE)))
    logits = torch.randn(6, 96, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    found = [
        Sampler(device, 96, (0,), make).sample(logits, batch).tolist()
        for make in (make_sampler, ReferenceSampler)
    ]
    assert found[0] == found[1]
    allowed = np.unpackbits(octets, 1, bitorder="little")
    assert all(allowed[number, found[0][place]] for number, place in enumerate((1, 3, 5)))


@pytest.mark.parametrize("block", [4, 16])
def test_inputs_of_a_decode(block: int) -> None:
    rng = np.random.default_rng(block)
    width, num_rows, window = 40, 7, 9
    rows = np.array([5, 0, 3, 6, 6], np.int32)  # two dummies
    computed = np.array([block * 3, 7, 39 * block - 1, 0, 0], np.int32)
    tokens = np.array([-1, 11, -1, 0, 0], np.int32)
    blocks = np.array([[50, -1, -1, -1, -1], [51, -1, 52, -1, -1]], np.int32)
    tables = rng.integers(0, 500, (2, num_rows, width)).astype(np.int32)

    def state() -> DecodeState:
        def room(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(shape, -7, dtype=dtype, device=DEVICE)

        return DecodeState(
            last_token=torch.arange(100, 107, device=DEVICE),
            block_tables=torch.from_numpy(tables.copy()).to(DEVICE),
            token_ids=room(6),
            positions=room(6),
            context_lens=room(6, dtype=torch.int32),
            slots=room(2, 6),
            tables=room(2, 6, width, dtype=torch.int32),
            block_size=block,
            window=window,
        )

    arrays = (torch.from_numpy(array).to(DEVICE) for array in (rows, computed, tokens, blocks))
    given, ours, theirs = DecodeInputs(*arrays), state(), state()
    decode_inputs(given, ours)
    reference.decode_inputs(given, theirs)
    for name in ("last_token", "block_tables", "token_ids", "positions", "context_lens", "slots"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for entry, position in enumerate(computed.tolist()):
        for group, first in ((0, 0), (1, max(position - window + 1, 0) // block)):
            seen = slice(first, position // block + 1)
            assert torch.equal(ours.tables[group, entry, seen], theirs.tables[group, entry, seen])


@pytest.mark.parametrize(("columns", "masked"), [(77, True), (1100, False)])
def test_logits_of_some_tokens(columns: int, masked: bool) -> None:
    vocab, count, generator = 1500, 7, torch.Generator().manual_seed(columns)
    ids = torch.randperm(vocab, generator=generator)[:columns].sort().values
    logits = 3 * torch.randn(count, columns, generator=generator)
    forbidden = (torch.rand(vocab, generator=generator) < 0.1).to(torch.uint8)
    keys = torch.from_numpy(row_keys(np.arange(count, dtype=np.uint64), np.arange(count) + 9))
    rows, heat = torch.arange(count, dtype=torch.int32), torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, 0.0, 2.0])
    filters, stops, allowed = None, None, None
    if masked:
        filters = torch.tensor([[20.0, 0.9, 0.01]]).repeat(count, 1)
        stops = early_stops({1: [int(ids[logits[1].argmax()])], 2: [vocab]}, count)
        allowed = allowed_of({4: set(range(0, vocab, 3)), 5: set(range(1, vocab, 2))}, count, vocab)
    results = []
    for make, device in ((make_sampler, DEVICE), (ReferenceSampler, "cpu")):

        def at(tensor: torch.Tensor, device: str = device) -> torch.Tensor:
            return tensor.to(device)

        mine = None if allowed is None else Allowed(at(allowed.index), at(allowed.octets))
        early, columns_of = (None if some is None else at(some) for some in (stops, filters))
        draws = SamplingInputs(at(keys), at(heat), at(rows), columns_of, mine, early)
        out, last = at(torch.zeros(count, dtype=torch.int64)), at(torch.zeros(count, dtype=torch.int64))
        make(at(forbidden), 4, ids=at(ids))(at(logits), draws, last, out)
        results += [out.tolist(), last.tolist()]
    assert results[0] == results[2]
    assert results[1] == results[3] == results[0]
    assert set(results[0]) <= set(ids.tolist())
