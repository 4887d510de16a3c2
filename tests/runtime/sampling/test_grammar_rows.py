"""GrammarRows when a matcher gives up: an empty mask, never the one that it left half made."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from chorale.engine.types import RowStart, SamplingSpec
from chorale.grammar.matcher import MASK_WORDS
from chorale.machine.hardware import Hardware
from chorale.runtime.device import CpuDevice
from chorale.runtime.sampling.grammar import GrammarRows

CPU = CpuDevice(Hardware("cpu", "test", 2**34, 2**34))


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
    masks = rows.masks(np.arange(len(failed), dtype=np.int32))
    assert masks is not None
    allowed = masks.octets.view(len(failed), 4 * MASK_WORDS)
    assert [bool(row.any()) for row in allowed] == [not each for each in failed]
