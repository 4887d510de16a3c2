"""The tier of host memory with the limits of a GPU: steps of prompts that displace whole conversations."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from chorale.config.engine import EngineConfig
from chorale.machine.hardware import Hardware
from chorale.model.config_writer import SHAPES, make_config
from chorale.runtime.sizing.resolve import resolve
from tests.support.engine.recording import Engine

H200 = Hardware("cuda", "NVIDIA H200", 141 * 10**9, 140 * 10**9)
LENGTH = 65_000


@pytest.mark.parametrize(("size", "batched"), [("20b", 8192), ("120b", 8192), ("120b", 32768)])
def test_a_long_conversation_is_loaded_to_its_last_block(size: str, batched: int) -> None:
    """A page that a step drops ends the prefix: all before it are of no use, however many they are."""
    config = EngineConfig(kv_offloading_size=24, num_gpu_blocks_override=2816, max_num_batched_tokens=batched)
    limits = asdict(resolve(config, make_config(**SHAPES[size]), H200).limits)
    engine = Engine(**(limits | {"vocab_size": 1000, "eos_token_ids": (2,)}))

    def generate(number: int, length: int) -> int:
        """Returns how many tokens of the prompt were cached."""
        engine.add(
            f"{len(engine.plans)}", [3 + (number * 331 + at * 7) % 990 for at in range(length)], max_tokens=1
        )
        chunks = []
        while engine.core.has_work:
            chunks += engine.core.step()
        return chunks[0].num_cached_tokens

    assert generate(0, LENGTH) == 0
    for number in range(1, 9):
        assert generate(number, 45_000) == 0
    assert generate(0, LENGTH) >= LENGTH - 2 * limits["block_size"]
    assert engine.core.stats().host_pages_dropped == 0
