"""Token ids equal openai-harmony's, over seeded random conversations."""

from __future__ import annotations

import random

import openai_harmony as oh
import pytest

from chorale.harmony.render import render_conversation
from chorale.harmony.vocab import Vocabulary
from tests.harmony.conversations import conversation, to_oracle

CASES = 5000


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))])
def test_ids_equal_openai_harmony(vocab: Vocabulary, oracle: oh.HarmonyEncoding, part: int) -> None:
    size = CASES // 5
    for seed in range(part * size, (part + 1) * size):
        ours = conversation(random.Random(seed))
        theirs = to_oracle(ours)
        keep = oh.RenderConversationConfig(auto_drop_analysis=False)
        expected = oracle.render_conversation_for_completion(theirs, oh.Role.ASSISTANT, keep)
        found = render_conversation(ours, vocab, drop_analysis=False)
        assert found == expected, (
            f"seed {seed}\nours     {vocab.decode(found)!r}\nexpected {vocab.decode(expected)!r}"
        )
