"""Rows with grammars in the engine: both overlap depths, preemption, prefix cache, batches, masks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.sequence import Sequence
from chorale.engine.types import GenerateRequest, RowStart, SamplingSpec, TokenChunk
from chorale.grammar.constraint import json_schema, regex
from chorale.grammar.frames import Frames, raw_grammar, turn_grammar
from chorale.grammar.matcher import MASK_WORDS
from chorale.harmony.render import ASSISTANT
from chorale.harmony.vocab import NUM_RANKS, RETURN, START
from chorale.kernels.ops import Allowed
from chorale.kernels.reference.sampling.sampling import ReferenceSampler
from chorale.machine.hardware import Hardware
from chorale.runtime.device import CpuDevice
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows, Masks
from chorale.serve.engine.build import build_engine
from tests.support.engine.drafters import Oracle
from tests.support.engine.integrity import check_integrity
from tests.support.grammar.schema_cases import BIAS, SCHEMAS, obj, valid
from tests.support.runtime import with_drafter
from tests.support.server import VOCAB

CPU = CpuDevice(Hardware("cpu", "test", 2**34, 2**34))
LOGIT_BIAS = {int(token): bias for token, bias in BIAS.items()}
PROMPT = [5, 6, 7, START, ASSISTANT]
Answers = dict[str, tuple[list[int], str | None, int]]


def engine(checkpoint: Path, depth: int = 0, **options: Any) -> EngineCore:
    settings = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 12, "num_threads": 1, **options}
    core, _ = build_engine(EngineConfig(model=str(checkpoint), **settings))
    limits = replace(core.limits, async_scheduling=depth)
    return EngineCore(limits, core._executor, grammars=core._pending_grammars._service)


def request(name: str, grammar: str, seed: int, **sampling: Any) -> GenerateRequest:
    spec = SamplingSpec(
        **{"grammar": grammar, "seed": seed, "max_tokens": 200, "logit_bias": LOGIT_BIAS, **sampling}
    )
    return GenerateRequest(request_id=name, prompt_token_ids=PROMPT, sampling=spec)


def free(name: str, seed: int) -> GenerateRequest:
    spec = SamplingSpec(seed=seed, max_tokens=30, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=[9, 10, 11, seed], sampling=spec)


def play(core: EngineCore, requests: Iterable[GenerateRequest]) -> Answers:
    """To the end: request id -> (tokens, finish reason or error, preemptions)."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, tuple[str | None, int]] = {}
    for each in requests:
        core.add_request(each)
        tokens[each.request_id] = []
    while core.has_work:
        for chunk in core.step():
            tokens[chunk.request_id] += chunk.token_ids
            if chunk.finish_reason is not None:
                ends[chunk.request_id] = (chunk.error or chunk.finish_reason, _preemptions(chunk))
        check_integrity(core)
    return {name: (ids, *ends[name]) for name, ids in tokens.items()}


def _preemptions(chunk: TokenChunk) -> int:
    return 0 if chunk.timings is None else chunk.timings.num_preemptions


def grammar_of(name: str) -> str:
    constraint = json_schema(SCHEMAS[name], "schema")
    return turn_grammar(Frames(answer=constraint, reasoning=(5, 3)))


def mixture() -> list[GenerateRequest]:
    names = [name for name in SCHEMAS if name != "anything"][:6]
    bound = [request(f"g{i}", grammar_of(name), i) for i, name in enumerate(names)]
    return [*bound, free("f0", 0), free("f1", 1), free("f2", 2)]


def check(answers: Answers) -> None:
    for i, name in enumerate([name for name in SCHEMAS if name != "anything"][:6]):
        tokens, finish, _ = answers[f"g{i}"]
        assert finish == "stop", (name, answers[f"g{i}"])
        assert tokens[-1] == RETURN
        text = VOCAB.decode(tokens[:-1]).rpartition("<|message|>")[2]
        assert valid(json.loads(text), SCHEMAS[name])
        body = VOCAB.encode(text)
        assert max(tokens[-1 - min(len(body), 3) : -1]) < NUM_RANKS  # no special token within the JSON


def plain(answers: Answers) -> dict[str, list[int]]:
    return {name: tokens for name, (tokens, _, _) in answers.items()}


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Answers:
    """Depth 0, room for all."""
    answers = play(engine(checkpoint), mixture())
    check(answers)
    return answers


def test_overlap_gives_the_same_tokens(checkpoint: Path, reference: Answers) -> None:
    assert plain(play(engine(checkpoint, depth=1), mixture())) == plain(reference)


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_gives_the_same_tokens(checkpoint: Path, reference: Answers, depth: int) -> None:
    core = engine(checkpoint, depth, num_gpu_blocks_override=18, block_size=16, max_model_len=208)
    answers = play(core, mixture())
    assert sum(preemptions for _, _, preemptions in answers.values()) > 3
    assert plain(answers) == plain(reference)


def test_free_rows_are_not_changed_by_grammars(checkpoint: Path, reference: Answers) -> None:
    alone = play(engine(checkpoint), [free("f0", 0), free("f1", 1), free("f2", 2)])
    for name, (tokens, _, _) in alone.items():
        assert tokens == reference[name][0]


def test_the_second_time_comes_from_the_prefix_cache(checkpoint: Path, reference: Answers) -> None:
    """And from the cache of grammars; a grammar row's prompt pages are anybody's."""
    core = engine(checkpoint, block_size=4)
    first = play(core, mixture())
    hits = core.stats().prefix_cache_hits
    assert plain(play(core, mixture())) == plain(first) == plain(reference)
    assert core.stats().prefix_cache_hits > hits


@pytest.mark.parametrize("depth", [0, 1])
def test_choices_of_one_request_have_matchers_of_their_own(checkpoint: Path, depth: int) -> None:
    core = engine(checkpoint, depth)
    grammar = raw_grammar(regex("[a-z]{1,4}(-[0-9]+)?;", "x"))
    core.add_request(request("r", grammar, 3, n=6, logit_bias={26: 8.0}))
    texts: dict[int, list[int]] = {index: [] for index in range(6)}
    while core.has_work:
        for chunk in core.step():
            texts[chunk.index] += chunk.token_ids
    found = {VOCAB.decode(ids[:-1]) for ids in texts.values()}
    assert len(found) > 1
    assert all(text.endswith(";") and text[0].islower() for text in found)


def test_a_turn_goes_on_within_its_grammar(checkpoint: Path) -> None:
    """``grammar_context``: the tokens at the prompt's end are the grammar's already."""
    core = engine(checkpoint)
    grammar = raw_grammar(regex("abcdef[xy]", "x"))
    begun = VOCAB.encode("abc")
    going_on = request("a", grammar, 1, grammar_context=len(begun))
    wrong = request("b", grammar, 1, grammar_context=len(begun) + 1)
    answers = play(
        core,
        [replace_prompt(going_on, [5, *begun]), replace_prompt(wrong, [5, *begun])],
    )
    assert VOCAB.decode(answers["a"][0][:-1]) in ("defx", "defy")
    assert answers["b"][1] == "the end of the prompt does not match the grammar"


def replace_prompt(given: GenerateRequest, prompt: list[int]) -> GenerateRequest:
    return GenerateRequest(request_id=given.request_id, prompt_token_ids=prompt, sampling=given.sampling)


def test_a_grammar_that_does_not_compile_ends_its_request_alone(checkpoint: Path) -> None:
    core = engine(checkpoint)
    answers = play(core, [request("bad", "{", 0), free("f0", 0)])
    assert "grammar" in str(answers["bad"][1])
    assert answers["f0"][1] == "length"


def test_a_held_request_can_be_aborted(checkpoint: Path) -> None:
    core = engine(checkpoint)
    core.add_request(request("r", grammar_of("wide"), 0))
    core.abort("r")
    assert [chunk.finish_reason for chunk in core.step()] == ["abort"]
    assert not core.has_work


def apply(masks: Masks, scores: torch.Tensor, first: int) -> None:
    """Forbid what the masks do not allow in ``scores`` [N, V], which are the places from ``first`` on."""
    index = torch.full((len(scores),), -1, dtype=torch.int32)
    for number, place in enumerate(masks.places.tolist()):
        if first <= place < first + len(scores):
            index[place - first] = number
    sampler = ReferenceSampler(torch.zeros(scores.shape[1], dtype=torch.uint8), len(scores))
    sampler.forbid(scores, Allowed(index, masks.octets))


def test_masks_allow_what_their_bits_say() -> None:
    """Rows next to each other and apart; many rows (filled by several threads) as one by one."""
    cache = GrammarCache(MASK_WORDS * 32)
    rows = GrammarRows(CPU, cache)
    grammars = [raw_grammar(regex(f"{char}+", "x")) for char in "abcdefghij"]
    for row, grammar in enumerate(grammars):
        spec = SamplingSpec(grammar=grammar)
        rows.start(RowStart(2 * row, np.zeros(1, np.int32), 1, spec, 0, ()))
    several = rows.masks(np.arange(20, dtype=np.int32))
    assert several is not None
    assert several.places.tolist() == list(range(0, 20, 2))
    for place, char in zip(several.places.tolist(), "abcdefghij", strict=True):
        one = rows.masks(np.array([place], np.int32))
        assert one is not None
        scores = torch.zeros(1, MASK_WORDS * 32)
        apply(one, scores, 0)
        batch = torch.zeros(2, MASK_WORDS * 32)
        apply(several, batch, place)
        assert torch.equal(batch[0], scores[0])
        assert not batch[1].any()  # a place without a grammar
        allowed = torch.isfinite(scores[0]).nonzero().flatten().tolist()
        assert {VOCAB.decode([token])[0] for token in allowed} == {char}
    cache.close()


def test_masks_do_not_hold_what_was_in_their_memory_before() -> None:
    cache = GrammarCache(MASK_WORDS * 32)
    found = []
    for before in (0, -1):
        rows = GrammarRows(CPU, cache)
        rows._mask_buffers = [
            torch.full((12 * MASK_WORDS,), before, dtype=torch.int32) for _ in rows._mask_buffers
        ]
        for row in range(12):
            grammar = raw_grammar(regex("[0-9]+", "x")) if row != 3 else "no grammar"  # 3: nothing allowed
            rows.start(RowStart(row, np.zeros(1, np.int32), 1, SamplingSpec(grammar=grammar), 0, ()))
        for some in (np.arange(12, dtype=np.int32), np.arange(2, 5, dtype=np.int32)):
            masks = rows.masks(some)
            assert masks is not None
            found.append(masks.octets.clone())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not found[0][3].any()
    assert found[0][4].any()
    cache.close()


def test_neighbouring_rows_are_masked_at_once() -> None:
    octets = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 8), dtype=np.uint8))
    masks = Masks(np.array([1, 2, 4]), octets)
    scores = torch.zeros(6, 64)
    apply(masks, scores, 0)
    expected = np.unpackbits(octets.numpy(), axis=1, bitorder="little").astype(bool)
    assert torch.equal(torch.isfinite(scores[[1, 2, 4]]), torch.from_numpy(expected))
    assert not scores[[0, 3, 5]].any()


def test_the_cache_forgets_the_oldest(checkpoint: Path) -> None:
    cache = GrammarCache(MASK_WORDS * 32, cache_bytes=300_000)
    for number in range(12):
        cache.matcher(raw_grammar(json_schema(obj(**{f"k{number}": {"type": "null"}}), "x")))
    assert 1 < len(cache._compiled) < 6
    cache.close()


# --------------------------------------------------------------------------- drafts


def drafted(core: EngineCore, known: Answers, **options: Any) -> EngineCore:
    """Drafts that continue the known answers, by ``options`` more or less rightly."""

    def future(sequence: Sequence) -> list[int]:
        return known[sequence.request_id][0]

    return with_drafter(core, Oracle(future, vocab_size=core.limits.vocab_size, **options))


RIGHT, WRONG = {"most": 4}, {"most": 3, "wrong": 1.0}
SOME_RIGHT = {"most": 9, "wrong": 0.2, "varies": True}


@pytest.mark.parametrize(
    ("drafts", "depth"),
    [
        pytest.param(RIGHT, 0, id="right-0"),
        pytest.param(RIGHT, 1, id="right-1", marks=pytest.mark.slow),
        pytest.param(WRONG, 0, id="wrong-0", marks=pytest.mark.slow),
        pytest.param(WRONG, 1, id="wrong-1"),
        pytest.param(SOME_RIGHT, 0, id="some right-0", marks=pytest.mark.slow),
        pytest.param(SOME_RIGHT, 1, id="some right-1"),
    ],
)
def test_drafts_change_nothing(
    checkpoint: Path, reference: Answers, depth: int, drafts: dict[str, Any]
) -> None:
    """A draft that the grammar does not allow is not accepted, and forbids nothing to what follows it."""
    core = drafted(engine(checkpoint, depth), reference, **drafts)
    assert plain(play(core, mixture())) == plain(reference)
    committer = core._scheduler.committer
    assert committer.num_draft_tokens > 100
    if "wrong" not in drafts:
        assert committer.num_accepted_tokens == committer.num_draft_tokens


def test_drafts_and_preemption_change_nothing(checkpoint: Path, reference: Answers) -> None:
    options = {"num_gpu_blocks_override": 16, "block_size": 16, "max_model_len": 208}
    core = drafted(engine(checkpoint, 1, **options), reference, most=6, wrong=0.1, varies=True)
    answers = play(core, mixture())
    assert sum(preemptions for _, _, preemptions in answers.values()) > 3
    assert plain(answers) == plain(reference)
