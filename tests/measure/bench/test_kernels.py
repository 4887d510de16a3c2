"""``chorale bench kernels``: its cases run on a CPU, with the reference operations."""

from __future__ import annotations

import torch

from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.measure.bench.kernels import Bench, Cost

SHAPE = {"experts": 4, "hidden": 128, "inter": 128, "heads": 8, "kv_heads": 2}


@torch.inference_mode()
def test_the_cost_of_a_case_is_what_it_has_to_move_and_to_compute() -> None:
    """Two tokens with 200 tokens of context, in gpt-oss's 2 bytes an element and 4.25 bits a weight."""
    costs = {}
    for name, work, _, cost in Bench(SHAPE, 2, REFERENCE_OPS, "cpu", vocab=1000).cases(2, 200):
        work()
        costs[name] = cost
    assert costs == {
        "qkv": Cost(2 * (768 * 128 + 2 * (768 + 128)), 2 * 2 * 768 * 128),
        "full": Cost(2 * 200 * 2 * 2 * 2 * 64, 2 * 200 * 8 * 64 * 2 * 2),
        "window": Cost(2 * 128 * 2 * 2 * 2 * 64, 2 * 128 * 8 * 64 * 2 * 2),
        "route": Cost(
            2 * (128 * 512 + 2 * (128 + 512)) + 4 * 128 * 4 + 2 * 128 * 8, 2 * 2 * (128 * 512 + 4 * 128)
        ),
        "experts": Cost(4 * 3 * 128 * 128 * 4.25 / 8 + 2 * 128 * 8, 2 * 2 * 4 * 3 * 128 * 128),
        "head": Cost(2 * (1000 * 128 + 2 * (1000 + 128)), 2 * 2 * 1000 * 128),
    }
