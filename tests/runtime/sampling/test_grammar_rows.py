"""GrammarRows: masks allow what their bits say, and a matcher that gives up leaves an empty one."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from chorale.engine.types import RowStart, SamplingSpec
from chorale.grammar.constraint import json_schema, regex
from chorale.grammar.frames import raw_grammar
from chorale.grammar.matcher import MASK_WORDS
from chorale.kernels.ops import Allowed
from chorale.kernels.reference.sampling.sampling import ReferenceSampler
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows
from tests.support.grammar.schema_cases import VOCAB, obj
from tests.support.runtime import CPU


class Matcher:
    """Allows every token; ``failed``: and then says that it met a limit."""

    def __init__(self, failed: bool) -> None:
        self._failed = failed

    def consume_tokens(self, tokens: list[int]) -> bool:
        return True

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        ctypes.memset(address, 0xFF, num_bytes)

    def is_error(self) -> bool:
        return self._failed


class Cache:
    """Hands out these matchers, in order."""

    def __init__(self, *failed: bool) -> None:
        self._matchers = [Matcher(each) for each in failed]

    def matcher(self, grammar: str) -> Matcher:
        return self._matchers.pop(0)


@pytest.mark.parametrize("failed", [(True, False), (False, True), (True, True)])
def test_a_matcher_in_error_forbids_every_token_of_its_row_alone(failed: tuple[bool, bool]) -> None:
    cache: Any = Cache(*failed)
    rows = GrammarRows(CPU, cache)
    for row in range(len(failed)):
        start = RowStart(
            row=row,
            token_ids=np.arange(3, dtype=np.int32),
            num_prompt_tokens=3,
            sampling=SamplingSpec(grammar="g"),
            seed=1,
            eos_token_ids=(7,),
        )
        rows.start(start)
    found = rows.allowed(np.arange(len(failed), dtype=np.int32))
    assert found is not None
    assert found.index.tolist() == list(range(len(failed)))
    octets = found.octets.view(len(failed), 4 * MASK_WORDS)
    assert [bool(row.any()) for row in octets] == [not each for each in failed]


def apply(allowed: Allowed, scores: torch.Tensor, first: int) -> None:
    """Forbid what the masks do not allow in ``scores`` [N, V], which are the samples from ``first`` on."""
    index = allowed.index[first : first + len(scores)]
    sampler = ReferenceSampler(torch.zeros(scores.shape[1], dtype=torch.uint8), len(scores))
    sampler.forbid(scores, Allowed(index, allowed.octets))


def test_masks_allow_what_their_bits_say() -> None:
    """Rows next to each other and apart; many rows (filled by several threads) as one by one."""
    cache = GrammarCache(MASK_WORDS * 32)
    rows = GrammarRows(CPU, cache)
    grammars = [raw_grammar(regex(f"{char}+", "x")) for char in "abcdefghij"]
    for row, grammar in enumerate(grammars):
        spec = SamplingSpec(grammar=grammar)
        rows.start(RowStart(2 * row, np.zeros(1, np.int32), 1, spec, 0, ()))
    several = rows.allowed(np.arange(20, dtype=np.int32))
    assert several is not None
    samples = (several.index >= 0).nonzero().flatten().tolist()
    assert samples == list(range(0, 20, 2))
    for sample, char in zip(samples, "abcdefghij", strict=True):
        one = rows.allowed(np.array([sample], np.int32))
        assert one is not None
        scores = torch.zeros(1, MASK_WORDS * 32)
        apply(one, scores, 0)
        batch = torch.zeros(2, MASK_WORDS * 32)
        apply(several, batch, sample)
        assert torch.equal(batch[0], scores[0])
        assert not batch[1].any()  # a sample without a grammar
        allowed = torch.isfinite(scores[0]).nonzero().flatten().tolist()
        assert {VOCAB.decode([token])[0] for token in allowed} == {char}
    cache.close()


def test_masks_overwrite_the_previous_content_of_their_memory() -> None:
    cache = GrammarCache(MASK_WORDS * 32)
    found = []
    for before in (0, -1):
        rows = GrammarRows(CPU, cache)
        rows._mask_buffers = [
            torch.full((12 * MASK_WORDS,), before, dtype=torch.int32) for _ in rows._mask_buffers
        ]
        for row in range(12):
            grammar = raw_grammar(regex("[0-9]+", "x")) if row != 3 else "no grammar"  # 3: nothing allowed
            rows.start(RowStart(row, np.zeros(1, np.int32), 1, SamplingSpec(grammar=grammar), 0, ()))
        for some in (np.arange(12, dtype=np.int32), np.arange(2, 5, dtype=np.int32)):
            allowed = rows.allowed(some)
            assert allowed is not None
            found.append(allowed.octets.clone())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not found[0][3].any()
    assert found[0][4].any()
    cache.close()


def test_the_cache_forgets_the_oldest() -> None:
    cache = GrammarCache(MASK_WORDS * 32, cache_bytes=300_000)
    for number in range(12):
        cache.matcher(raw_grammar(json_schema(obj(**{f"k{number}": {"type": "null"}}), "x")))
    assert 1 < len(cache._compiled) < 6
    cache.close()
