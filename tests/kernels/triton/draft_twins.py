"""The kernels of steps with drafts, against plain torch. As ``twins.py``: run through
``test_step_interpreter.py`` or on a GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from chorale.engine.types import DRAFT, EARLY_STOPS, REJECTED
from chorale.kernels.draft_steps import (
    LAST,
    NEW_BLOCKS,
    Accepted,
    DraftPasses,
    DraftRowState,
    VerifyBatch,
    VerifyInputs,
)
from chorale.kernels.reference.sampling import draft_steps as reference
from chorale.kernels.reference.sampling.noise import key_bases, position_keys, row_keys
from chorale.kernels.triton.sampling import draft_steps as ours
from tests.kernels.triton.twins import DEVICE

WIDTH, ROWS, WINDOW, SPARE = 40, 7, 9, 6


def row_state(seed: int, block: int, num_drafts: int) -> DraftRowState:
    rng = np.random.default_rng(seed)

    def numbers(low: int, high: int, *shape: int, dtype: type = np.int64) -> torch.Tensor:
        return torch.from_numpy(rng.integers(low, high, shape).astype(dtype)).to(DEVICE)

    positions = numbers(8 * block, 30 * block, ROWS)
    positions[SPARE] = 1
    return DraftRowState(
        last_token=numbers(0, 1000, ROWS),
        last_position=positions,
        drafts=numbers(0, 1000, num_drafts, ROWS),
        key_bases=torch.from_numpy(key_bases(rng.integers(0, 2**64, ROWS, dtype=np.uint64))).to(DEVICE),
        may_stop_at=numbers(0, 40 * block, ROWS),
        stops=numbers(-1, 1000, ROWS, EARLY_STOPS, dtype=np.int32),
        floats=torch.from_numpy(rng.random((ROWS, 4), np.float32)).to(DEVICE),
        block_tables=numbers(0, 500, 2, ROWS, WIDTH, dtype=np.int32),
        block_size=block,
        window=WINDOW,
        dummy_block=600,
    )


def copied(state: DraftRowState) -> DraftRowState:
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return dataclasses.replace(
        state, **{name: value.clone() for name, value in fields.items() if torch.is_tensor(value)}
    )


def empty_batch(count: int) -> VerifyBatch:
    def room(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, -7, dtype=dtype, device=DEVICE)

    return VerifyBatch(
        token_ids=room(count),
        positions=room(count),
        context_lens=room(count, dtype=torch.int32),
        slots=room(2, count),
        tables=room(2, count, WIDTH, dtype=torch.int32),
        keys=room(count, 2, dtype=torch.int32),
        temperature=room(count, dtype=torch.float32),
        filters=room(count, 3, dtype=torch.float32),
        early_stops=room(count, EARLY_STOPS, dtype=torch.int32),
    )


def inputs(state: DraftRowState, places: int, block: int) -> VerifyInputs:
    """Four rows and a dummy: a draft of the host, one of the device, a shorter one, a row without."""
    rows = np.array([5, 0, 3, 1, SPARE], np.int32)
    computed = np.array([block * 3, 7 * block, 20 * block - 1, 11 * block - 1, 0], np.int32)
    num_drafts = np.minimum([places - 1, places - 1, 1, 0, 0], places - 1).astype(np.int32)
    tokens = np.full((places, 5), 17, np.int32)
    tokens[0] = [LAST, LAST, 44, LAST, 0]
    for offset in range(1, places):
        tokens[offset] = [100 + offset, DRAFT - (offset - 1), 200 + offset, 17, 0]
    first_new = computed // block + np.array([0, 1, 1, 0, 0], np.int32)
    blocks = np.full((2, NEW_BLOCKS, 5), -1, np.int32)
    blocks[0, 0], blocks[1, 0] = [50, -1, 52, 53, -1], [60, -1, 62, -1, -1]
    blocks[:, 1, 2] = [54, 64]
    arrays = rows, computed, num_drafts, tokens, first_new.astype(np.int32), blocks
    return VerifyInputs(*(torch.from_numpy(array).to(DEVICE) for array in arrays))


@pytest.mark.parametrize("places", [1, 2, 4])
@pytest.mark.parametrize("block", [8, 16])
def test_verify_inputs_equal_the_reference(places: int, block: int) -> None:
    mine = row_state(places, block, 3)
    theirs, given = copied(mine), inputs(mine, places, block)
    count = 5 * places
    batches = empty_batch(count + 2), empty_batch(count + 2)
    ours.verify_inputs(given, mine, batches[0])
    reference.verify_inputs(given, theirs, batches[1])
    assert torch.equal(mine.block_tables, theirs.block_tables)
    for field in dataclasses.fields(VerifyBatch):
        if field.name != "tables":
            found, wanted = (getattr(batch, field.name) for batch in batches)
            assert torch.equal(found, wanted), field.name
    for place, position in enumerate(batches[1].positions[:count].tolist()):
        for group, first in ((0, 0), (1, max(position - WINDOW + 1, 0) // block)):
            seen = slice(first, position // block + 1)
            assert torch.equal(batches[0].tables[group, place, seen], batches[1].tables[group, place, seen])


def test_verify_inputs_take_what_the_device_knows() -> None:
    """Positions, tokens and noise of a row whose draft is on the device follow its last token there."""
    block, places = 16, 4
    state = row_state(3, block, 3)
    given, batch = inputs(state, places, block), empty_batch(20)
    before = copied(state)
    ours.verify_inputs(given, state, batch)
    row, first = 0, places  # the second entry
    at = int(before.last_position[row])
    assert batch.positions[first : first + places].tolist() == [at, at + 1, at + 2, at + 3]
    assert batch.token_ids[first : first + places].tolist() == [
        int(before.last_token[row]),
        *before.drafts[:, row].tolist(),
    ]
    third = batch.token_ids[2 * places : 3 * places].tolist()
    assert third == [44, 201, 44, 44]  # places without a draft token compute the first again
    assert (batch.slots[:, 2 * places + 2 : 3 * places] // block == 600).all()


@pytest.mark.parametrize("profile", [None, (0.0, 0.0, 0.0), (1.0, 1.0, 0.0), (0.6, 0.5, 0.5)])
@pytest.mark.parametrize("places", [1, 2, 4])
def test_accept_equals_the_reference(places: int, profile: tuple[float, ...] | None) -> None:
    rng = np.random.default_rng(places)
    mine = row_state(places, 16, 3)
    theirs, given, count = copied(mine), inputs(mine, places, 16), 5 * places
    batch = empty_batch(count)
    reference.verify_inputs(given, theirs, batch)
    samples = torch.from_numpy(rng.integers(0, 1000, count)).to(DEVICE)
    following = batch.token_ids.roll(-1)
    agrees = torch.from_numpy(rng.random(count) < 0.7).to(DEVICE)
    samples = torch.where(agrees, following, samples)
    samples[0] = -1  # no finite logits
    chances = None if profile is None else torch.tensor(profile, device=DEVICE)
    found = [
        Accepted(*(torch.full((size,), -7, dtype=torch.int64, device=DEVICE) for size in (count, count, 5)))
        for _ in range(2)
    ]
    ours.accept(samples, batch, given, mine, found[0], chances)
    theirs = dataclasses.replace(theirs, last_token=theirs.last_token, last_position=theirs.last_position)
    reference.accept(samples, batch, given, theirs, found[1], chances)
    for field in dataclasses.fields(Accepted):
        assert torch.equal(getattr(found[0], field.name), getattr(found[1], field.name)), field.name
    assert torch.equal(mine.last_token, theirs.last_token)
    assert torch.equal(mine.last_position, theirs.last_position)
    kept = (found[0].tokens.view(5, places) != REJECTED).sum(1)
    assert (kept >= 1).all()
    assert (kept <= 1 + given.num_drafts).all()
    if profile == (1.0, 1.0, 0.0):
        assert torch.equal(kept, 1 + given.num_drafts.clamp(max=2))


@pytest.mark.parametrize("longest", [1, 3])
def test_draft_passes_equal_the_reference(longest: int) -> None:
    state = row_state(longest, 16, 3)
    rows = torch.tensor([5, SPARE, 0, 2], dtype=torch.int32, device=DEVICE)
    size = 6

    def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, -7, dtype=dtype, device=DEVICE)

    def passes() -> DraftPasses:
        return DraftPasses(
            keys=room(longest, size, 2),
            temperature=room(size, dtype=torch.float32),
            positions=room(longest, size, dtype=torch.int64),
            context_lens=room(longest, size),
            slots=room(longest, size, dtype=torch.int64),
            tables=room(size, WIDTH),
        )

    found, wanted = passes(), passes()
    ours.draft_passes(rows, state, found)
    reference.draft_passes(rows, state, wanted)
    for field in dataclasses.fields(DraftPasses):
        if field.name != "tables":
            assert torch.equal(getattr(found, field.name), getattr(wanted, field.name)), field.name
    for entry, row in enumerate(rows.tolist()):
        seen = (int(state.last_position[row]) + longest - 2) // 16 + 1
        assert torch.equal(found.tables[entry, :seen], wanted.tables[entry, :seen])


def test_keys_of_the_device_are_those_of_the_host() -> None:
    rng = np.random.default_rng(1)
    seeds, positions = rng.integers(0, 2**64, 500, dtype=np.uint64), rng.integers(0, 200_000, 500)
    found = position_keys(torch.from_numpy(key_bases(seeds)), torch.from_numpy(positions))
    assert np.array_equal(found.numpy(), row_keys(seeds, positions))
