"""The token counts of an answer are read from the usage of each API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chorale.requests.usage import TokenUsage, usage_of

CHAT = {
    "prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 1},
}  # fmt: skip
RESPONSES = {
    "input_tokens": 7, "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 6, "output_tokens_details": {"reasoning_tokens": 5},
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}, TokenUsage(3, 0, 2, 0)),
        ({"usage": CHAT}, TokenUsage(3, 1, 2, 1)),
        ({"usage": RESPONSES}, TokenUsage(7, 4, 6, 5)),
        ({"usage": None}, TokenUsage()),
        ({"usage": {"prompt_tokens": "many"}}, TokenUsage()),
        ([], TokenUsage()),
    ],
)
def test_token_counts_are_read_from_the_usage(body: Any, usage: TokenUsage) -> None:
    assert usage_of(json.dumps(body).encode()) == usage_of(body) == usage
