"""Log-probabilities of an engine's prompts, and by how much two engines differ.

In float32 (TF32 stays off) a GPU differs from the CPU by the order of sums only. In bfloat16 each matrix
product rounds its inputs to 8 bits, which on a random model now and then turns the choice between two nearly
equal experts and moves that token's logits as a whole: so the mean is bounded tightly and the worst loosely.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.runtime import make_engine, random_prompt, request, run

LENGTHS = (1, 31, 32, 33, 127, 128, 129, 300, 900)
FLOAT32_BOUND = 1e-3
BFLOAT16_MEAN_BOUND = 0.03
BFLOAT16_WORST_BOUND = 1.0


def scores(checkpoint: Path, **options: Any) -> dict[str, list[float]]:
    """Log-probabilities of every prompt token."""
    core = make_engine(checkpoint, **{"ops": "reference", **options})
    asked = [request(f"r{n}", random_prompt(n, seed=n), max_tokens=1, prompt_logprobs=0) for n in LENGTHS]
    answers = run(core, asked)
    core.shutdown()
    return {
        name: [entry.logprob for entry in (choices[0].prompt_logprobs or []) if entry is not None]
        for name, choices in answers.items()
    }


def differences(left: dict[str, list[float]], right: dict[str, list[float]]) -> list[float]:
    assert left.keys() == right.keys()
    return [abs(a - b) for name in left for a, b in zip(left[name], right[name], strict=True)]


def check_rounding(found: list[float], times: float = 1.0) -> None:
    """Within ``times`` what bfloat16 may be off by."""
    assert sum(found) / len(found) < times * BFLOAT16_MEAN_BOUND
    assert max(found) < times * BFLOAT16_WORST_BOUND
