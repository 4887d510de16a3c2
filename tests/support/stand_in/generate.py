"""A script of ``test_npu_stand_in.py``: prints tokens and log-probabilities of the demo model as JSON.

python -m tests.support.stand_in.generate '{"device": "npu", "tensor_parallel_size": 2}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from chorale import LLM, SamplingParams
from chorale.llm.params import StructuredOutputsParams

PROMPTS = ["The capital of France is", "Two and two is", "One, two, three,", "A number:", "The capital of"]
PARAMS = [
    SamplingParams(seed=1, max_tokens=5),
    SamplingParams(temperature=0, max_tokens=5, logprobs=2),
    SamplingParams(seed=2, max_tokens=5, top_p=0.8, top_k=40, min_p=0.01),
    SamplingParams(seed=3, max_tokens=5, structured_outputs=StructuredOutputsParams(regex="[0-9]{4}")),
    SamplingParams(seed=4, max_tokens=5, presence_penalty=1.0, repetition_penalty=1.2, min_tokens=4),
]


def generate(**options: Any) -> dict[str, Any]:
    with LLM("demo", dtype="float32", max_model_len=256, max_num_seqs=8, **options) as llm:
        found = [llm.generate(PROMPTS, PARAMS) for _ in range(2)][1]  # the second run uses cached blocks
    outputs = [each.outputs[0] for each in found]
    scores = [
        [sorted(value.logprob for value in place.values()) for place in output.logprobs or []]
        for output in outputs
    ]
    return {"tokens": [list(each.token_ids) for each in outputs], "scores": scores}


def check_apart() -> None:
    """Asserts that an operation on tensors of device and host fails."""
    with pytest.raises(RuntimeError, match="tensors are on npu and on cpu"):
        _ = torch.ones(2, device="npu") + torch.ones(2)


if __name__ == "__main__":
    json.dump(generate(**json.loads(sys.argv[1])), sys.stdout)
    check_apart()
