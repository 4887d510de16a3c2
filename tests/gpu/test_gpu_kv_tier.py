"""KV pages in host memory on a GPU: bytes, tokens with captured graphs, loads beside steps.

``pytest -m gpu``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.engine.core import EngineCore
from chorale.kernels.reference.pages import ReferencePageCopies
from tests.runtime.test_host_tier import check_traffic
from tests.support.runtime import make_engine, random_prompt, request, run, tokens_of

if torch.cuda.is_available():
    from chorale.kernels.triton.pages import TritonPageCopies
    from chorale.runtime.device import open_device

pytestmark = pytest.mark.gpu
SETTINGS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "ops": "triton", "max_model_len": 1024}


@pytest.mark.parametrize("ops", ["reference", "triton"])
def test_random_traffic_arrives(ops: str) -> None:
    copies = TritonPageCopies if ops == "triton" else ReferencePageCopies
    check_traffic(open_device("cuda"), copies, 400)


def tier(folder: Path, **options: Any) -> EngineCore:
    settings = {"num_gpu_blocks_override": 120, "kv_offloading_size": 0.1, "async_scheduling": True}
    return make_engine(folder, **{**SETTINGS, **settings, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"enforce_eager": True},
        {"kv_offloading_size": 0.002},
        {"max_num_batched_tokens": 64},
    ],
    ids=["overlap", "serial", "eager", "thrashing", "chunked"],
)
def test_conversations_return_while_others_decode(
    checkpoint: Path,
    options: dict[str, Any],
) -> None:
    """Eight conversations of 400 to 700 tokens over a pool that holds three, each round with one that
    decodes all the time."""
    talks = [random_prompt(400 + 40 * number, seed=number) for number in range(8)]
    plain, core = make_engine(checkpoint, **SETTINGS), tier(checkpoint, **options)
    for turn in range(3):
        for number in range(0, 8, 2):
            asked = [
                request(f"long{turn}{number}", random_prompt(20, seed=99 + number), max_tokens=120, seed=5),
                *(
                    request(
                        f"t{turn}.{each}",
                        talks[each] + random_prompt(5 * turn, seed=turn * 100 + each),
                        max_tokens=12,
                        seed=each,
                        temperature=float(each % 2),
                    )
                    for each in (number, number + 1)
                ),
            ]
            assert tokens_of(run(core, asked)) == tokens_of(run(plain, asked))
    stats = core.stats()
    if "kv_offloading_size" not in options:
        assert stats.host_cache_hits > 3000
    assert stats.host_bytes_saved > 0


def test_a_load_runs_beside_decoding_steps(checkpoint: Path) -> None:
    """The conversation returns while eight rows decode in graphs; all equal an engine without the tier."""
    core, plain = (
        tier(checkpoint, num_gpu_blocks_override=200, max_num_seqs=16),
        make_engine(checkpoint, **SETTINGS, max_num_seqs=16),
    )
    talk = random_prompt(900, seed=1)
    run(core, [request("first", talk, max_tokens=4, seed=1)])
    for number in range(6):
        run(core, [request(f"other{number}", random_prompt(900, seed=50 + number), max_tokens=2)])
    asked = [request(f"d{row}", random_prompt(30, seed=row), max_tokens=100, seed=row) for row in range(8)]
    asked.append(request("back", talk, max_tokens=20, seed=3))
    together = run(core, asked)
    assert tokens_of(together) == tokens_of(run(plain, asked))
    assert together["back"][0].num_cached_tokens == 896
    assert core.stats().num_host_loads >= 1
