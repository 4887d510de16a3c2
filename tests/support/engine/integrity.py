"""check_integrity: asserts that the engine's data structures agree with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from chorale.engine.core import EngineCore
from chorale.engine.engine_state import EngineState
from chorale.engine.kv_cache.blocks import BlockPool
from chorale.engine.plan import StepRecord
from chorale.engine.sequence import Sequence, Status
from chorale.engine.waiting import WaitingQueue, is_live, tokens_left


def check_integrity(core: EngineCore) -> None:
    """Raises AssertionError if blocks, rows, tables and queue contradict each other.

    Takes time in proportion to the size of the pool.
    """
    engine = core._engine
    sequences = [sequence for state in engine.requests.values() for sequence in state.sequences]
    _check_blocks(engine, sequences)
    _check_rows(engine, sequences)
    _check_queue(engine, sequences)
    check_host(engine)
    for sequence in engine.running.values():
        _check_progress(engine, sequence)


def _check_blocks(engine: EngineState, sequences: list[Sequence]) -> None:
    """Check that each block is owned, cached-free or plain-free, and that tables explain every reference."""
    held: list[int] = [] if engine.loads is None else engine.loads.held
    for sequence in sequences:
        blocks = sequence.blocks
        if not sequence.is_running:
            assert not blocks.full, f"{sequence} holds blocks"
            assert not blocks.window, f"{sequence} holds window blocks"
        if sequence.load is not None and sequence.load.is_done:
            assert sequence.status is Status.WAITING, f"{sequence} keeps its load"
            held += sequence.load.held
        own = blocks.full + blocks.window
        assert len(own) == len(set(own)), f"{sequence} has one block in two places"
        held += own
    check_pool(engine.cache.pool, held)


def check_host(engine: EngineState) -> None:
    """Raise AssertionError unless each slot of host memory is free, cached or held by running copies, and the
    index contains it."""
    tier, loads = engine.cache.tier, engine.loads
    if tier is None or loads is None:
        return
    held = [
        slot for load in loads._running.values() for slot in (*(page[3] for page in load.pages), *load.saved)
    ]
    check_pool(tier.slots, held)


def _check_rows(engine: EngineState, sequences: list[Sequence]) -> None:
    """Check that each row is exactly one of free, running and retiring."""
    rows, num_rows = engine.rows, len(engine.rows.sequences)
    retiring = [row for record in engine.in_flight for row in record.retiring]
    everything = rows.free + list(engine.running) + retiring
    assert sorted(everything) == list(range(num_rows)), f"rows do not partition: {everything}"
    for row in rows.free:
        assert rows.sequences[row] is None, f"free row {row} has a sequence"
    for row, sequence in engine.running.items():
        assert rows.sequences[row] is sequence, f"row {row} belongs to {rows.sequences[row]}"
        assert sequence.row == row
        assert sequence.is_running
    running = {id(sequence) for sequence in sequences if sequence.is_running}
    assert running == {id(sequence) for sequence in engine.running.values()}, "a running sequence has no row"
    for row in range(num_rows):
        owner = engine.running.get(row)
        if rows.decoding[row]:
            assert owner is not None, f"row {row} decodes without a sequence"
            assert owner.status is Status.DECODE
    for account in {sequence.account for sequence in sequences}:
        own = [sequence for sequence in sequences if sequence.account is account]
        assert account.num_rows == sum(each.is_running for each in own), "an owner's rows are miscounted"
        assert account.num_requests == len({each.request_id for each in own}), "requests are miscounted"
    prefills = [sequence for sequence in engine.running.values() if sequence.status is Status.PREFILL]
    assert sorted(map(id, prefills)) == sorted(map(id, engine.prefills)), "prefills are not the PREFILL ones"


def _check_queue(engine: EngineState, sequences: list[Sequence]) -> None:
    waiting = [sequence for sequence in sequences if sequence.status is Status.WAITING]
    assert sorted(map(id, waiting)) == sorted(map(id, live(engine.waiting))), "the queue is not the WAITING"
    assert len(waiting) == len(engine.waiting), "the queue miscounts"
    assert sum(map(tokens_left, waiting)) == engine.waiting.num_tokens, "the queue miscounts its tokens"
    held = [sequence for sequence in sequences if sequence.status is Status.WAITING_FOR_PREFIX]
    assert len(held) == engine.num_waiting_for_prefix, "choices that wait for a prefix are miscounted"
    loading = [sequence for sequence in sequences if sequence.status is Status.LOADING]
    assert sorted(map(id, loading)) == sorted(map(id, engine.loading.values())), "LOADING are miscounted"
    loaded = [each for each in sequences if each.load is not None and each.load.is_done]
    assert sorted(map(id, loaded)) == sorted(map(id, engine.loaded.values())), (
        "loads that wait are miscounted"
    )
    for sequence in held:
        state = sequence.request
        leader = state.sequences[state.leader]
        is_alive = leader.is_running or leader.status in (Status.WAITING, Status.LOADING)
        assert is_alive, f"{sequence} waits for ever"
        assert not state.prompt_done, f"{sequence} waits for ever"
    for state in engine.requests.values():
        alive = sum(sequence.status is not Status.ENDED for sequence in state.sequences)
        assert alive == state.num_unfinished > 0, f"{state.request.request_id} miscounts its choices"


def _check_progress(engine: EngineState, sequence: Sequence) -> None:
    """Check that blocks cover what is computed and what the next query can see, and that positions match the
    tokens."""
    blocks, bs = sequence.blocks, engine.limits.block_size
    computed = int(engine.rows.computed[sequence.row])
    in_flight = sum(
        int(record.plan.num_new[record.plan.rows == sequence.row].sum())
        for record in engine.in_flight
        if sequence.row not in record.dead_rows
    )
    committed = computed - in_flight
    assert 0 <= committed <= computed, f"{sequence}: {computed} computed, {in_flight} in flight"
    assert len(blocks.full) * bs >= computed, f"{sequence}: blocks end before {computed}"
    assert blocks.window_start + len(blocks.window) == len(blocks.full), f"{sequence}: tables end apart"
    # Decoding rows give window blocks back when they fill a block, so up to bs - 1 tokens late.
    earliest = engine.cache.first_window_block(committed // bs * bs)
    latest = engine.cache.first_window_block(committed)
    assert earliest <= blocks.window_start <= latest, f"{sequence}: window starts at {blocks.window_start}"
    assert sequence.num_tokens <= sequence.max_len, f"{sequence} is too long"
    if sequence.status is Status.DECODE:
        unsampled = computed - (sequence.num_tokens - 1)
        most = sum(1 + draft_of(record, sequence.row) for record in engine.in_flight)
        assert 0 <= unsampled <= most, f"{sequence}: {unsampled} tokens ahead of its own"
        has_draft = any(draft_of(record, sequence.row) for record in engine.in_flight)
        on_device = bool(engine.rows.drafts_on_device[sequence.row])
        assert bool(engine.rows.is_uncertain[sequence.row]) == (has_draft and on_device)
        if has_draft and not on_device:
            assert not engine.rows.decoding[sequence.row], f"{sequence}: planned again with a draft in flight"
        assert computed <= sequence.max_len - 1, f"{sequence} computes beyond its end"
    else:
        assert computed < len(sequence.tokens_to_compute), f"{sequence} has nothing to prefill"
    if sequence.request.root is not None:
        assert blocks.num_published == committed // bs, f"{sequence}: {blocks.num_published} blocks published"


def draft_of(record: StepRecord, row: int) -> int:
    """Returns the number of draft tokens that a step in flight computes for the row's current sequence."""
    if record.plan.num_drafts is None or row in record.dead_rows:
        return 0
    return int(record.plan.num_drafts[record.plan.rows == row].sum())


def check_pool(pool: BlockPool, held: Iterable[int]) -> None:
    """Raise AssertionError unless the three states partition the pool and ``held`` (every table's
    every block, once per table) explains each reference."""
    counts = Counter(held)
    plain, cached = set(pool._plain), set(pool._cached)
    assert len(plain) == len(pool._plain), "a block is on the free stack twice"
    assert not plain & cached, f"blocks both plain and cached: {plain & cached}"
    for block in range(pool.num_blocks):
        refs = pool._refs[block]
        assert refs == counts[block], f"block {block}: {refs} references, {counts[block]} holders"
        free = block in plain or block in cached
        assert free == (refs == 0), f"block {block}: refs {refs} but free is {free}"
        assert not (block in plain and pool._key[block]), f"block {block} is cached yet on the stack"
        assert not (block in cached and not pool._key[block]), f"block {block} is cached without a key"
    keyed = [(key, block) for block, key in enumerate(pool._key) if key is not None]
    assert len(keyed) == sum(len(index) for index in pool._index), "index and keys differ in number"
    for (group, block_hash), block in keyed:
        assert pool._index[group].get(block_hash) == block, f"index does not lead to block {block}"


def live(queue: WaitingQueue) -> list[Sequence]:
    """Returns the waiting sequences."""
    return [entry[1] for heap in queue._heaps.values() for entry in heap if is_live(entry)]
