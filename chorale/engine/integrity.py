"""check_integrity: everything the engine's parts must agree on, asserted from first principles."""

from __future__ import annotations

from chorale.engine.lifecycle import Lifecycle
from chorale.engine.sequence import Sequence, Status


def check_integrity(life: Lifecycle) -> None:
    """Raise AssertionError at the first contradiction."""
    sequences = [sequence for state in life.requests.values() for sequence in state.sequences]
    _check_pages(life, sequences)
    _check_rows(life, sequences)
    _check_queue(life, sequences)
    for sequence in life.running.values():
        _check_progress(life, sequence)


def _check_pages(life: Lifecycle, sequences: list[Sequence]) -> None:
    """Pages partition into owned, cached-free and plain-free; tables explain every reference."""
    held: list[int] = []
    for sequence in sequences:
        pages = sequence.pages
        if not sequence.is_running:
            assert not pages.full, f"{sequence} holds pages"
            assert not pages.window, f"{sequence} holds window pages"
        own = pages.full + pages.window
        assert len(own) == len(set(own)), f"{sequence} has one page in two places"
        held += own
    life.cache.pool.check(held)


def _check_rows(life: Lifecycle, sequences: list[Sequence]) -> None:
    """Each row is free, running or retiring; exactly one of them."""
    rows, num_rows = life.rows, len(life.rows.sequences)
    retiring = [row for record in life.in_flight for row in record.retiring]
    everything = rows.free + list(life.running) + retiring
    assert sorted(everything) == list(range(num_rows)), f"rows do not partition: {everything}"
    for row in rows.free:
        assert rows.sequences[row] is None, f"free row {row} has a sequence"
    for row, sequence in life.running.items():
        assert rows.sequences[row] is sequence, f"row {row} belongs to {rows.sequences[row]}"
        assert sequence.row == row
        assert sequence.is_running
    running = {id(sequence) for sequence in sequences if sequence.is_running}
    assert running == {id(sequence) for sequence in life.running.values()}, "a running sequence has no row"
    for row in range(num_rows):
        owner = life.running.get(row)
        if rows.decoding[row]:
            assert owner is not None, f"row {row} decodes for nobody"
            assert owner.status is Status.DECODE
    prefills = [sequence for sequence in life.running.values() if sequence.status is Status.PREFILL]
    assert sorted(map(id, prefills)) == sorted(map(id, life.prefills)), "prefills are not the PREFILL ones"


def _check_queue(life: Lifecycle, sequences: list[Sequence]) -> None:
    waiting = [sequence for sequence in sequences if sequence.status is Status.WAITING]
    assert sorted(map(id, waiting)) == sorted(map(id, life.waiting.live())), "the queue is not the WAITING"
    assert len(waiting) == len(life.waiting), "the queue miscounts"
    held = [sequence for sequence in sequences if sequence.status is Status.HELD]
    assert len(held) == life.num_held, "held choices are miscounted"
    for sequence in held:
        state = sequence.request
        leader = state.sequences[state.leader]
        assert leader.is_running or leader.status is Status.WAITING, f"{sequence} is held for ever"
        assert not state.prompt_done, f"{sequence} is held for ever"
    for state in life.requests.values():
        alive = sum(sequence.status is not Status.ENDED for sequence in state.sequences)
        assert alive == state.num_unfinished > 0, f"{state.request.request_id} miscounts its choices"


def _check_progress(life: Lifecycle, sequence: Sequence) -> None:
    """Pages cover what is computed and what the next query can see; positions fit the tokens."""
    pages, bs = sequence.pages, life.limits.block_size
    computed = int(life.rows.computed[sequence.row])
    in_flight = sum(
        int(record.plan.num_new[record.plan.rows == sequence.row].sum())
        for record in life.in_flight
        if sequence.row not in record.dead_rows
    )
    committed = computed - in_flight
    assert 0 <= committed <= computed, f"{sequence}: {computed} computed, {in_flight} in flight"
    assert len(pages.full) * bs >= computed, f"{sequence}: pages end before {computed}"
    assert pages.window_start + len(pages.window) == len(pages.full), f"{sequence}: tables end apart"
    # Decoding rows give window pages back when they fill a page, so up to bs - 1 tokens late.
    earliest = life.cache.first_window_page(committed // bs * bs)
    latest = life.cache.first_window_page(committed)
    assert earliest <= pages.window_start <= latest, f"{sequence}: window starts at {pages.window_start}"
    assert sequence.num_tokens <= sequence.max_len, f"{sequence} is too long"
    if sequence.status is Status.DECODE:
        unsampled = computed - (sequence.num_tokens - 1)
        assert 0 <= unsampled <= len(life.in_flight), f"{sequence}: {unsampled} tokens ahead of its own"
        assert computed <= sequence.max_len - 1, f"{sequence} computes beyond its end"
    else:
        assert computed < len(sequence.known), f"{sequence} has nothing to prefill"
    if sequence.request.root is not None:
        assert pages.num_published == committed // bs, f"{sequence}: {pages.num_published} pages published"
