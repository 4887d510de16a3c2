"""The drafters that need no weights: where they look, what they propose, what they hold."""

from __future__ import annotations

import random

import numpy as np
import pytest

from chorale.config.speculative import SpeculativeConfig
from chorale.engine.drafts.lookup import (
    NgramDrafter,
    RecentAnswers,
    SuffixDrafter,
    TokenBuffer,
    follow_longest,
)
from chorale.engine.sequence import RequestState, Sequence
from chorale.engine.types import GenerateRequest
from chorale.serve.engine.build import make_drafter


def sequence(prompt: list[int], output: list[int] | None = None, salt: str = "") -> Sequence:
    request = GenerateRequest(request_id="r", prompt_token_ids=prompt, cache_salt=salt)
    state = RequestState(request, np.array(prompt, np.int32), None, 0.0)
    found = Sequence(state, 0, key=(0, 0), seed=0, max_len=1000)
    state.sequences.append(found)
    found.output = output or []
    return found


def by_hand(tail: list[int], tokens: list[int], least: int, most: int) -> tuple[int, int]:
    """What ``follow_longest`` must find, place by place."""
    best = (0, 0)
    for end in range(1, len(tokens)):
        for length in range(least, min(most, len(tail), end) + 1):
            if tokens[end - length : end] == tail[-length:] and length >= best[1]:
                best = (end, length)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_latest_of_the_longest_matches_is_found(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        tail = rng.choice((tokens, [rng.randrange(3) for _ in range(rng.randint(1, 6))]))
        least = rng.randint(1, 3)
        most = rng.randint(least, 8)
        found = follow_longest(np.array(tail, np.int32), np.array(tokens, np.int32), least, most)
        assert found == by_hand(tail, tokens, least, most), (tail, tokens, least, most)


def test_ngram_continues_the_longest_match_of_prompt_and_output() -> None:
    prompt = [1, 2, 3, 4, 5, 9, 2, 3, 7, 7]

    def after(*output: int, most: int = 10) -> list[int]:
        return NgramDrafter(3, 2, 4).propose(sequence(prompt, list(output)), most).tolist()

    assert after() == []  # no two tokens came before
    assert after(2, 3) == [7, 7, 2]
    assert after(1, 2, 3) == [4, 5, 9]
    assert after(1, 2, 3, most=2) == [4, 5]
    assert after(1, 2, 3, 88) == []


def test_a_loop_is_continued_past_its_end() -> None:
    text = sequence([8, 1, 2, 3, 1, 2, 3])
    assert NgramDrafter(7, 1, 3).propose(text, 9).tolist() == [1, 2, 3, 1, 2, 3, 1]


def test_an_ended_sequence_is_forgotten() -> None:
    drafter, text = NgramDrafter(3, 1, 2), sequence([1, 1, 1])
    drafter.propose(text, 3)
    drafter.end(text)
    assert drafter._buffers == {}
    drafter.end(sequence([1]))  # was never proposed for


def test_a_buffer_follows_its_sequence() -> None:
    text = sequence(list(range(100)))
    buffer = TokenBuffer(text.all_tokens())
    for token in range(1000):
        text.output.append(token)
        if token % 7 == 0:
            buffer.catch_up(text)
            assert buffer.tokens.tolist() == text.all_tokens().tolist()


def test_suffix_finds_recent_answers_of_the_same_salt_only() -> None:
    drafter = SuffixDrafter(8)
    drafter.end(sequence([1], [5, 6, 7, 8, 9, 10]))
    assert drafter.propose(sequence([2, 5, 6, 7]), 9).tolist() == [8, 9, 10]
    assert drafter.propose(sequence([2, 5, 6, 7], salt="other"), 9).tolist() == []
    assert drafter.propose(sequence([2, 6, 7]), 9).tolist() == [8, 9]  # as long as its match
    assert drafter.propose(sequence([2, 7]), 9).tolist() == []  # a match of one is too short


def test_the_options_of_suffix_reach_the_drafter() -> None:
    config = SpeculativeConfig(
        method="suffix",
        num_speculative_tokens=8,
        suffix_decoding_max_tree_depth=3,
        suffix_decoding_max_spec_factor=2.0,
        suffix_decoding_max_cached_requests=0,
    )
    drafter = make_drafter(config)
    assert drafter is not None
    text = [*range(10, 40), 1, *range(10, 20)]  # a match of ten tokens, of which three count
    assert drafter.propose(sequence(text), 9).tolist() == [20, 21, 22, 23, 24, 25]
    drafter.end(sequence([1], [5, 6, 7, 8, 9, 10]))
    assert drafter.propose(sequence([2, 5, 6, 7]), 9).tolist() == []  # no answers are kept
    ngram = make_drafter(
        SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_min=2, prompt_lookup_max=2)
    )
    assert ngram is not None
    assert ngram.propose(sequence([5, 6, 7, 8, 9, 5, 6]), 9).tolist() == [7, 8]
    assert ngram.propose(sequence([5, 6, 7, 8, 9, 6]), 9).tolist() == []
    assert make_drafter(None) is None


def test_a_draft_never_reaches_into_the_next_answer() -> None:
    drafter = SuffixDrafter(8)
    drafter.end(sequence([1], [3, 4, 5]))
    drafter.end(sequence([1], [6, 7]))
    assert drafter.propose(sequence([3, 4]), 9).tolist() == [5]
    assert drafter.propose(sequence([3, 4, 5]), 9).tolist() == []


def test_the_longer_match_wins_and_its_own_text_at_a_tie() -> None:
    drafter = SuffixDrafter(8)
    drafter.end(sequence([1], [1, 2, 3, 40]))
    assert drafter.propose(sequence([2, 3, 50, 2, 3]), 1).tolist() == [50]
    assert drafter.propose(sequence([2, 3, 50, 1, 2, 3]), 1).tolist() == [40]


def test_recent_answers_are_bounded_and_the_newest_stay() -> None:
    answers, everything = RecentAnswers(64), list[int]()
    rng = random.Random(0)
    for number in range(300):
        answer = [number] * rng.randint(1, 90)
        answers.add(answer)
        everything += [-1, *answer[-32:]]
        assert len(answers.tokens) <= 64
        assert answers.tokens.tolist() == everything[-len(answers.tokens) :]
        assert number in answers.tokens


def test_the_number_of_salts_is_bounded() -> None:
    drafter = SuffixDrafter(4)
    for number in range(100):
        drafter.end(sequence([1], [1, 2, 3], salt=f"s{number}"))
    assert len(drafter._answers) == 16
    assert drafter.propose(sequence([1, 2], salt="s99"), 4).tolist() == [3]
