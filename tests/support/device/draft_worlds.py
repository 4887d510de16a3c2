"""Random requests on a random checkpoint, with and without drafts: both must give the same answers.

A world is one engine's life: limits, requests, arrivals and aborts, all from a seed. Requests share prefixes,
the pool is small, and every sampling parameter of the engine occurs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from chorale.engine.core import EngineCore
from chorale.engine.drafts.lookup import NgramDrafter, SuffixDrafter
from chorale.engine.engine_state import Drafter
from chorale.engine.types import GenerateRequest, SamplingSpec
from tests.support.engine.drafters import Nonsense, knowing
from tests.support.engine.integrity import check_integrity
from tests.support.runtime import VOCAB, Answer, run, with_drafter

Answers = dict[str, list[Answer]]
MAX_PROMPT, MAX_TOKENS = 70, 24
STOPS = (7, 11, 200, 300)


def drafters(seed: int, vocab_size: int, known: Answers) -> dict[str, Callable[[], Drafter]]:
    """Returns a factory for every kind of drafter, by name. ``known``: the answers without drafts."""
    return {
        "ngram": lambda: NgramDrafter(1 + seed // 3 % 5, 1 + seed % 2, 3),
        "right": lambda: knowing(known, most=1 + seed % 7, vocab_size=vocab_size, seed=seed),
        "suffix": lambda: SuffixDrafter(6, least=1, capacity=512),
        "nonsense": lambda: Nonsense(vocab_size, 1 + seed % 4, seed),
        "some right": lambda: knowing(
            known, most=8 + 22 * (seed % 2), varies=True, wrong=0.2, vocab_size=vocab_size, seed=seed
        ),
    }


KINDS = ("ngram", "right", "suffix", "nonsense", "some right")


def random_sampling(rng: random.Random, grammars: Sequence[str] = ()) -> dict[str, Any]:
    """Returns random sampling parameters of one request, often with one of the ``grammars``."""
    sampling: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.0)),
        "seed": rng.randrange(2**63),
        "max_tokens": rng.choice((1, 2, rng.randint(3, MAX_TOKENS), rng.randint(3, MAX_TOKENS))),
        "n": rng.choice((1, 1, 1, 1, 2)),
    }
    choices: list[tuple[float, str, Any]] = [
        (0.2, "top_p", rng.uniform(0.3, 0.99)),
        (0.2, "top_k", rng.randint(1, 40)),
        (0.15, "min_p", rng.uniform(0.001, 0.2)),
        (0.15, "presence_penalty", rng.uniform(-2, 2)),
        (0.15, "frequency_penalty", rng.uniform(-2, 2)),
        (0.15, "repetition_penalty", rng.uniform(0.7, 1.5)),
        (0.1, "logit_bias", {rng.randrange(VOCAB): rng.uniform(-5, 8) for _ in range(3)}),
        (
            0.1 if grammars else 0.35,
            "allowed_token_ids",
            tuple(rng.sample(range(VOCAB), rng.choice((2, 3, 3, 40)))),
        ),
        (0.15, "bad_words", tuple(tuple(rng.choices(range(VOCAB), k=rng.randint(1, 2))) for _ in range(30))),
        (0.2, "min_tokens", rng.randint(1, 8)),
        (0.3, "stop_token_ids", STOPS),
        (0.3, "logprobs", rng.choice((0, 2))),
        (0.1, "prompt_logprobs", rng.choice((0, 1))),
        (0.2, "logprob_token_ids", (3, 1)),
        (0.1, "skip_reading_prefix_cache", True),
        (0.5, "ignore_eos", True),
        (0.8 if grammars else 0.0, "grammar", rng.choice(grammars or ("",))),
    ]
    return sampling | {name: value for chance, name, value in choices if rng.random() < chance}


def random_requests(rng: random.Random, count: int, grammars: Sequence[str] = ()) -> list[GenerateRequest]:
    stems = [[rng.randrange(VOCAB) for _ in range(MAX_PROMPT)] for _ in range(3)]
    found = []
    for number in range(count):
        stem = rng.choice(stems)[: rng.randint(0, MAX_PROMPT - 10)]
        prompt = stem + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 10))]
        spec = SamplingSpec(**random_sampling(rng, grammars))
        found.append(
            GenerateRequest(
                request_id=f"r{number}",
                prompt_token_ids=prompt or [1],
                priority=rng.randrange(3),
                cache_salt=rng.choice(("", "", "", "salt")),
                sampling=spec,
            )
        )
    return found


def random_limits(rng: random.Random, block_size: int) -> dict[str, Any]:
    """Returns engine limits with few blocks: one to a few of the longest requests fit."""
    return {
        "num_blocks": 2 * (MAX_PROMPT + MAX_TOKENS) * rng.choice((1, 1, 2, 5)) // block_size + 8,
        "max_num_batched_tokens": rng.choice((6, 20, 64, 256)),
        "max_num_seqs": rng.randint(1, 8),
        "async_scheduling": rng.random() < 0.5,
        "enable_prefix_caching": rng.random() < 0.8,
        "policy": rng.choice(("fcfs", "priority")),
    }


@dataclass
class World:
    """The outcome of a world: its answers, and counts that show whether drafts were used."""

    answers: Answers
    aborted: set[str]
    core: EngineCore


def live(core: EngineCore, requests: list[GenerateRequest], rng: random.Random) -> World:
    """Runs requests that arrive a few at a time; some are aborted. Checks integrity after each step."""
    answers: Answers = {each.request_id: [Answer() for _ in range(each.sampling.n)] for each in requests}
    waiting, aborted = list(requests), set[str]()
    while waiting or core.has_work:
        while waiting and rng.random() < 0.6:
            core.add_request(waiting.pop(0))
        if rng.random() < 0.01 and core._engine.requests:
            aborted.add(name := rng.choice(sorted(core._engine.requests)))
            core.abort(name)
        for chunk in core.step():
            answers[chunk.request_id][chunk.index].add(chunk)
        check_integrity(core)
    assert core.stats().kv_blocks_used == 0
    return World(answers, aborted, core)


def check_equal(found: Answers, expected: Answers, aborted: Collection[str] = ()) -> None:
    """Asserts that answers are equal, with log-probabilities; an aborted one is a prefix of the expected."""
    assert found.keys() == expected.keys()
    for name, choices in expected.items():
        for one, other in zip(found[name], choices, strict=True):
            length = len(one.token_ids)
            if name not in aborted or one.finish_reason != "abort":
                assert (one.finish_reason, one.error) == (other.finish_reason, other.error), name
                assert length == len(other.token_ids), name
                check_records(one.prompt_logprobs or [], other.prompt_logprobs or [])
            assert one.token_ids == other.token_ids[:length], name
            check_records(one.logprobs, other.logprobs[: len(one.logprobs)])
            assert len(one.logprobs) == (length if other.logprobs else 0), name


def check_records(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for record, wanted in zip(found, expected, strict=True):
        if wanted is None:
            assert record is None
            continue
        assert record.token_id == wanted.token_id
        assert record.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert record.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-4)


class Tally:
    """Counts over worlds, which show that all intended cases occurred."""

    def __init__(self) -> None:
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()

    def add(self, kind: str, world: World) -> None:
        stats = world.core.stats()
        self.drafted[kind] += stats.num_draft_tokens
        self.accepted[kind] += stats.num_accepted_tokens
        self.happened["preemptions"] += stats.num_preemptions
        self.happened["prefix hits"] += stats.prefix_cache_hits
        self.happened["aborts"] += len(world.aborted)

    def check(self) -> None:
        """Raises AssertionError if a case did not occur."""
        drafted, accepted = self.drafted, self.accepted
        assert all(drafted[kind] > 10 for kind in KINDS), drafted
        assert accepted["right"] == drafted["right"]
        assert all(0 < accepted[kind] < drafted[kind] for kind in ("ngram", "suffix", "some right")), accepted
        assert accepted["nonsense"] < drafted["nonsense"] / 20, accepted
        assert all(self.happened[what] for what in ("preemptions", "prefix hits", "aborts")), self.happened


def check_world(device: EngineCore, seed: int, kind: str, count: int, grammars: Sequence[str] = ()) -> World:
    """Run one world on the device of ``device``, without drafts and with drafts of ``kind``."""
    rng = random.Random(f"{seed}")
    requests = random_requests(rng, count, grammars)
    expected = run(with_drafter(device, None), requests)

    drafter = drafters(seed, device.limits.vocab_size, expected)[kind]()
    limits = random_limits(rng, device.limits.block_size)
    world = live(with_drafter(device, drafter, **limits), requests, rng)
    check_equal(world.answers, expected, world.aborted)
    return world
