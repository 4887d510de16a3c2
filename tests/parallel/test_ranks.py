"""Engines of 2 and 4 rank processes: every kind of request gives what one rank gives.

Tokens are compared exactly: a request names its seed, so its draws are a function of its logits, and no
logits here come closer to a tie than ranks differ by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorale.config.speculative import SpeculativeConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import GenerateRequest, TokenLogprobs
from chorale.grammar import constraint
from chorale.grammar.frames import raw_grammar
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from tests.support.device.draft_worlds import check_equal as check_nearly_equal
from tests.support.engine.drafters import knowing
from tests.support.engine.integrity import check_integrity
from tests.support.runtime import Answer, random_prompt, request, run, running, with_drafter

BOUND = 1e-5
# The vocabulary of grammars, and two KV heads a rank.
WIDE: dict[str, Any] = {
    "layers": 2,
    "experts": 5,
    "hidden": 32,
    "inter": 3 * 64,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 16,
    "sliding_window": 32,
}
Answers = dict[str, list[Answer]]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("wide"), make_config(**WIDE), seed=3)


DRAFTS = SpeculativeConfig(method="synthetic", num_speculative_tokens=3)  # of a random head


Cores = tuple[EngineCore, EngineCore]  # of one rank, and of two


@pytest.fixture(scope="module")
def odd_cores(odd: Path) -> Iterator[Cores]:
    with running(odd) as alone, running(odd, tensor_parallel_size=2) as ranks:
        yield alone, ranks


@pytest.fixture(scope="module")
def wide_cores(wide: Path, odd_cores: Cores) -> Iterator[Cores]:
    """Beside ``odd_cores``, which run on: sockets, meeting points and groups are each engine's own."""
    with running(wide) as alone, running(wide, tensor_parallel_size=2) as ranks:
        yield alone, ranks


def fresh(cores: Cores, **limits: Any) -> Cores:
    """Engines that have seen no request, on the same ranks: to start those takes longer than most tests."""
    alone, ranks = (with_drafter(core, None, **limits) for core in cores)
    return alone, ranks


def common(prompt: list[int]) -> list[GenerateRequest]:
    """One request of each kind that any vocabulary allows."""
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "hot": {"temperature": 1.0},
        "top_k": {"top_k": 7},
        "top_p": {"top_p": 0.6},
        "min_p": {"min_p": 0.2},
        "filters": {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
        "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        "greedy_penalties": {"temperature": 0, "repetition_penalty": 1.5},
        "bias": {"logit_bias": {5: 6.0, 700: 6.0, 1012: -100.0}, "top_p": 0.9},
        "allowed": {"allowed_token_ids": (3, 64, 129, 511, 1012)},
        "bad_words": {"temperature": 0, "bad_words": ((488,), (865, 905), (638,))},
        "min_tokens": {"min_tokens": 5, "stop_token_ids": (7,), "logit_bias": {7: 12.0}},
        "logprobs": {"logprobs": 5},
        "logprob_of_the_token": {"logprobs": 0, "temperature": 0},
        "named_logprobs": {"logprobs": 0, "logprob_token_ids": (1012, 5, 700)},
        "skips_the_cache": {"skip_reading_prefix_cache": True},
        "prompt_logprobs": {"prompt_logprobs": 4},
        "several": {"n": 3},
    }
    return [
        request(name, prompt + random_prompt(number, number), seed=number, max_tokens=12, **spec)
        for number, (name, spec) in enumerate(kinds.items(), 1)
    ]


def check_records(found: list[TokenLogprobs | None], expected: list[TokenLogprobs | None]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert (one.token_id, one.top_ids) == (other.token_id, other.top_ids)
        # Among a thousand logits, two that are nearly equal change places when the order of a sum does.
        assert one.rank == pytest.approx(other.rank, abs=1 if one.rank > 20 else 0)
        assert one.logprob == pytest.approx(other.logprob, abs=BOUND)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=BOUND)


def check_equal(found: Answers, expected: Answers, *, cached: bool = True) -> None:
    """``cached`` False: what is cached depends on when requests were admitted, as by compiled grammars."""
    for name, answers in expected.items():
        for one, other in zip(found[name], answers, strict=True):
            assert one.token_ids == other.token_ids, name
            assert (one.finish_reason, one.error) == (other.finish_reason, other.error), name
            assert one.num_cached_tokens == other.num_cached_tokens or not cached, name
            check_records(list(one.logprobs), list(other.logprobs))
            check_records(one.prompt_logprobs or [], other.prompt_logprobs or [])


def check_every_kind(alone: EngineCore, ranks: EngineCore) -> None:
    requests = common(random_prompt(50, 1))
    expected = run(alone, requests)
    assert not any(answer.error for answers in expected.values() for answer in answers)
    assert expected["logprobs"][0].logprobs
    assert expected["prompt_logprobs"][0].prompt_logprobs
    check_equal(run(ranks, requests), expected)


def test_every_kind_of_request(odd_cores: Cores) -> None:
    check_every_kind(*fresh(odd_cores))


@pytest.mark.slow
def test_every_kind_of_request_on_four_ranks(odd: Path, odd_cores: Cores) -> None:
    with running(odd, tensor_parallel_size=4) as ranks:
        check_every_kind(fresh(odd_cores)[0], ranks)


def test_a_cached_prefix(odd_cores: Cores) -> None:
    alone, ranks = fresh(odd_cores)
    prompt = random_prompt(100, 2)
    first = request("first", prompt, max_tokens=4, seed=1)
    second = request("second", [*prompt, 1, 2, 3], max_tokens=8, seed=2, logprobs=2)
    run(alone, [first])
    run(ranks, [first])
    expected = run(alone, [second])
    assert expected["second"][0].num_cached_tokens >= 96
    check_equal(run(ranks, [second]), expected)


def test_preemption(odd_cores: Cores) -> None:
    """A pool that is too small for all: rows are taken away and computed again."""
    requests = [
        request(str(n), random_prompt(20 + n, n), max_tokens=40, seed=n, frequency_penalty=0.2 * (n % 2))
        for n in range(8)
    ]
    alone, ranks = fresh(odd_cores, num_blocks=32, max_model_len=128, enable_prefix_caching=False)
    expected = run(alone, requests)
    found = run(ranks, requests)
    assert sum(answers[0].num_preemptions for answers in found.values()) > 0
    check_equal(found, expected)


def test_abort_in_the_middle(odd_cores: Cores) -> None:
    """The row of an aborted request goes to another, on every rank."""
    long = request("long", random_prompt(30, 1), max_tokens=60, seed=1)
    other = request("other", random_prompt(40, 2), max_tokens=30, seed=2)
    later = request("later", random_prompt(35, 3), max_tokens=20, seed=3, presence_penalty=0.5)
    alone, ranks = fresh(odd_cores, max_num_seqs=2)
    expected = run(alone, [other, later])
    answers: Answers = {"long": [Answer()], "other": [Answer()], "later": [Answer()]}
    for each in (long, other, later):
        ranks.add_request(each)
    for step in range(10_000):
        if not ranks.has_work:
            break
        if step == 6:
            ranks.abort("long")
        for chunk in ranks.step():
            answers[chunk.request_id][chunk.index].add(chunk)
        check_integrity(ranks)
    assert answers["long"][0].finish_reason == "abort"
    assert 0 < len(answers["long"][0].token_ids) < 60
    check_equal(answers, expected)


def test_grammars_and_wide_filters(wide_cores: Cores) -> None:
    """Masks of the rank's part of the vocabulary, and thresholds that are found by bisection."""
    prompt = random_prompt(20, 1)
    digits = raw_grammar(constraint.regex("[0-9]{3}-[a-z]{2,9}", "p"))
    schema = constraint.json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "p"
    )
    requests = [
        request("digits", prompt, grammar=digits, seed=1, max_tokens=30, ignore_eos=False),
        request("greedy", prompt, grammar=digits, temperature=0, max_tokens=30, ignore_eos=False),
        request("schema", prompt, grammar=raw_grammar(schema), seed=2, max_tokens=30, ignore_eos=False),
        request("biased", prompt, grammar=digits, seed=3, max_tokens=30, logit_bias={16: 3.0}, top_p=0.7),
        request("top_k", prompt, top_k=3000, seed=4, max_tokens=8, logprobs=20),
        request("top_p", prompt, top_p=0.5, top_k=150_000, seed=5, max_tokens=8),
    ]
    alone, ranks = fresh(wide_cores)
    expected = run(alone, requests)
    assert not any(answer.error for answers in expected.values() for answer in answers)
    check_equal(run(ranks, requests), expected, cached=False)
    drafts = knowing(expected, most=4, varies=True, wrong=0.2, vocab_size=ranks.limits.vocab_size)
    check_equal(run(with_drafter(ranks, drafts), requests), expected, cached=False)


def test_draft_heads_and_whole_experts_of_ranks_change_no_token(wide: Path, wide_cores: Cores) -> None:
    """Every rank drafts by itself; their drafts must be the same."""
    kinds = {"hot", "filters", "penalties", "logprobs", "several"}
    requests = [each for each in common(random_prompt(30, seed=4)) if each.request_id in kinds]
    assert len(requests) == len(kinds)
    _, plain = fresh(wide_cores)
    expected = run(plain, requests)
    assert not plain.stats().num_accepted_tokens
    options = {"speculative_config": DRAFTS, "enable_expert_parallel": True}
    with running(wide, tensor_parallel_size=2, **options) as core:
        check_nearly_equal(run(core, requests), expected)
        assert core.stats().num_accepted_tokens
