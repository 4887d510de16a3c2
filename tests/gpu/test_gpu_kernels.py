"""The Triton kernels on a GPU: op by op against the reference, and the whole engine. ``pytest -m gpu``.

The op tests are those that CI runs through the interpreter (``tests/kernels/triton/twins.py``), here
compiled and in bfloat16 too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import test_gpu_engine as whole
from tests.gpu.test_gpu_engine import checkpoint  # noqa: F401  (a fixture)

if torch.cuda.is_available():
    from tests.kernels.triton.twins import *  # noqa: F403
    from tests.kernels.triton.twins_draft import *  # noqa: F403
    from tests.kernels.triton.twins_e4m3 import *  # noqa: F403
    from tests.kernels.triton.twins_experts import *  # noqa: F403
    from tests.kernels.triton.twins_large import *  # noqa: F403

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("chunk", [7, 64, 2048])
def test_engine_in_float32_equals_the_cpu(checkpoint: Path, chunk: int) -> None:  # noqa: F811
    cpu = whole.scores(checkpoint, device="cpu")
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "ops": "triton"}
    gpu = whole.scores(checkpoint, **options, max_num_batched_tokens=chunk)
    assert max(whole.differences(cpu, gpu)) < whole.FLOAT32_BOUND


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_engine_in_bfloat16_stays_within_its_bound(checkpoint: Path, block_size: int) -> None:  # noqa: F811
    cpu = whole.scores(checkpoint, device="cpu")
    gpu = whole.scores(checkpoint, device="cuda", dtype="bfloat16", ops="triton", block_size=block_size)
    found = whole.differences(cpu, gpu)
    assert sum(found) / len(found) < whole.BFLOAT16_MEAN_BOUND
    assert max(found) < whole.BFLOAT16_WORST_BOUND


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_with_fp8_blocks_stays_near_the_cpu_with_fp8_blocks(checkpoint: Path, dtype: str) -> None:  # noqa: F811
    """The same roundings of K and V on both sides, but for values next to a midpoint."""
    cpu = whole.scores(checkpoint, device="cpu", kv_cache_dtype="fp8")
    gpu = whole.scores(checkpoint, device="cuda", dtype=dtype, ops="triton", kv_cache_dtype="fp8")
    found = whole.differences(cpu, gpu)
    assert sum(found) / len(found) < 2 * whole.BFLOAT16_MEAN_BOUND
    assert max(found) < 2 * whole.BFLOAT16_WORST_BOUND


def test_any_company_gives_the_same_tokens(checkpoint: Path) -> None:  # noqa: F811
    options = {"async_scheduling": True, "num_gpu_blocks_override": 72, "ops": "triton"}
    whole.test_any_company_and_any_cutting_gives_the_same_tokens(checkpoint, options)
