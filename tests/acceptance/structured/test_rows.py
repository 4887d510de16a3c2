"""Rows with grammars in the engine: overlap, preemption, choices.
``tests/runtime/test_draft_properties.py`` tests that drafts and the prefix cache change nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chorale.engine.core import EngineCore
from chorale.engine.types import GenerateRequest, SamplingSpec
from chorale.grammar.constraint import json_schema, regex
from chorale.grammar.frames import Frames, raw_grammar, turn_grammar
from chorale.harmony.render import ASSISTANT
from chorale.harmony.vocab import NUM_RANKS, RETURN, START
from tests.support.grammar.schema_cases import BIAS, SCHEMAS, valid
from tests.support.runtime import Answer, make_engine, run, tokens_of
from tests.support.server import VOCAB

LOGIT_BIAS = {int(token): bias for token, bias in BIAS.items()}
PROMPT = [5, 6, 7, START, ASSISTANT]


def engine(checkpoint: Path, depth: int = 0, **options: Any) -> EngineCore:
    settings = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 12, "async_scheduling": depth > 0}
    return make_engine(checkpoint, **{**settings, **options})


def request(name: str, grammar: str, seed: int, **sampling: Any) -> GenerateRequest:
    spec = SamplingSpec(
        **{"grammar": grammar, "seed": seed, "max_tokens": 200, "logit_bias": LOGIT_BIAS, **sampling}
    )
    return GenerateRequest(request_id=name, prompt_token_ids=PROMPT, sampling=spec)


def free(name: str, seed: int) -> GenerateRequest:
    spec = SamplingSpec(seed=seed, max_tokens=30, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=[9, 10, 11, seed], sampling=spec)


def grammar_of(name: str) -> str:
    constraint = json_schema(SCHEMAS[name], "schema")
    return turn_grammar(Frames(answer=constraint, reasoning=(5, 3)))


def mixture() -> list[GenerateRequest]:
    names = [name for name in SCHEMAS if name != "anything"][:6]
    bound = [request(f"g{i}", grammar_of(name), i) for i, name in enumerate(names)]
    return [*bound, free("f0", 0), free("f1", 1), free("f2", 2)]


def check(answers: dict[str, list[Answer]]) -> None:
    for i, name in enumerate([name for name in SCHEMAS if name != "anything"][:6]):
        [answer] = answers[f"g{i}"]
        tokens = answer.token_ids
        assert answer.finish_reason == "stop", (name, answer)
        assert tokens[-1] == RETURN
        text = VOCAB.decode(tokens[:-1]).rpartition("<|message|>")[2]
        assert valid(json.loads(text), SCHEMAS[name])
        body = VOCAB.encode(text)
        assert max(tokens[-1 - min(len(body), 3) : -1]) < NUM_RANKS  # no special token within the JSON


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> dict[str, list[list[int]]]:
    """Returns the tokens at overlap depth 0, with enough blocks for all requests."""
    answers = run(engine(checkpoint), mixture())
    check(answers)
    return tokens_of(answers)


def test_overlap_and_preemption_give_the_same_tokens(
    checkpoint: Path, reference: dict[str, list[list[int]]]
) -> None:
    core = engine(checkpoint, depth=1, num_gpu_blocks_override=18, block_size=16, max_model_len=208)
    answers = run(core, mixture())
    assert sum(answer.num_preemptions for [answer] in answers.values()) > 3
    assert tokens_of(answers) == reference


def test_choices_of_one_request_have_separate_matchers(checkpoint: Path) -> None:
    core = engine(checkpoint, depth=1)
    grammar = raw_grammar(regex("[a-z]{1,4}(-[0-9]+)?;", "x"))
    choices = run(core, [request("r", grammar, 3, n=6, logit_bias={26: 8.0})])["r"]
    found = {VOCAB.decode(choice.token_ids[:-1]) for choice in choices}
    assert len(found) > 1
    assert all(text.endswith(";") and text[0].islower() for text in found)


def test_a_turn_can_continue_within_its_grammar(checkpoint: Path) -> None:
    """``grammar_context``: the last tokens of the prompt already belong to the grammar's text."""
    core = engine(checkpoint)
    grammar = raw_grammar(regex("abcdef[xy]", "x"))
    begun = VOCAB.encode("abc")
    going_on = request("a", grammar, 1, grammar_context=len(begun))
    wrong = request("b", grammar, 1, grammar_context=len(begun) + 1)
    asked = [msgspec.structs.replace(each, prompt_token_ids=[5, *begun]) for each in (going_on, wrong)]
    answers = run(core, asked)
    assert VOCAB.decode(answers["a"][0].token_ids[:-1]) in ("defx", "defy")
    assert answers["b"][0].error == "the end of the prompt does not match the grammar"
