"""A random workload for an engine, on CPU or GPU: arrivals, lengths, sampling, aborts, too few blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from chorale.engine.core import EngineCore
from tests.support.engine.integrity import check_integrity
from tests.support.runtime import VOCAB, request

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 20, "min_p": 0.01},
    {"logprobs": 2},
    {"frequency_penalty": 0.3, "logit_bias": {5: 1.0}},
]


def soak(core: EngineCore, num_requests: int, seed: int, memory: Callable[[], int]) -> list[int]:
    """Serve ``num_requests`` random requests; returns ``memory()`` after each quarter of them.

    Every request must end, aborted or with as many tokens as it asked for, and every block must be freed.
    """
    rng = np.random.default_rng(seed)
    wanted: dict[str, int] = {}
    got: dict[str, int] = {}
    marks, sent, ended = [], 0, 0
    while ended < num_requests:
        while sent < num_requests and len(wanted) - ended < 24 and rng.random() < 0.7:
            name, tokens = f"s{sent}", int(rng.integers(1, 40))
            prompt = rng.integers(0, VOCAB, int(rng.integers(1, 200))).tolist()
            sampling = SAMPLINGS[int(rng.integers(len(SAMPLINGS)))]
            core.add_request(request(name, prompt, max_tokens=tokens, seed=sent, **sampling))
            wanted[name], got[name] = tokens, 0
            sent += 1
        if sent and rng.random() < 0.02:
            core.abort(f"s{int(rng.integers(sent))}")
        for chunk in core.step() if core.has_work else []:
            got[chunk.request_id] += len(chunk.token_ids)
            assert chunk.error is None, chunk.error
            if chunk.finish_reason is not None:
                assert chunk.finish_reason == "abort" or got[chunk.request_id] == wanted[chunk.request_id]
                ended += 1
                if ended % (num_requests // 4) == 0:
                    marks.append(memory())
    while core.has_work:
        core.step()
    check_integrity(core)
    assert core.stats().kv_blocks_used == 0
    return marks
