"""Graders give no false verdict on handwritten answers: right in odd forms, or wrong but plausible."""

from __future__ import annotations

import time
from typing import Any

import graded_answers as answers
import pytest
from chorale_evals.graders import Grader, regex
from chorale_evals.graders.choice import Choice
from chorale_evals.graders.exact import Exact
from chorale_evals.graders.number import Number
from chorale_evals.graders.regex import Regex
from chorale_evals.graders.schema import JsonSchema
from chorale_evals.graders.text import MAX_CHARS
from chorale_evals.task import Outcome
from graded_answers import CHOICES, Case
from hypothesis import given, settings
from hypothesis import strategies as st


def _options(case: Case) -> dict[str, Any]:
    return case[2] if len(case) > 2 else {}


SETS: list[tuple[type[Grader], list[Case], list[Case]]] = [
    (Number, answers.RIGHT_NUMBERS, answers.WRONG_NUMBERS),
    (Exact, answers.RIGHT_STRINGS, answers.WRONG_STRINGS),
    (JsonSchema, answers.RIGHT_JSON, answers.WRONG_JSON),
    (Regex, answers.RIGHT_PATTERNS, answers.WRONG_PATTERNS),
    (
        Choice,
        [*((text, "C", CHOICES) for text in answers.RIGHT_CHOICES), *answers.RIGHT_ARTICLES],
        [*((text, "C", CHOICES) for text in answers.WRONG_CHOICES), *answers.WRONG_ARTICLES],
    ),
]


@pytest.mark.parametrize(
    ("grader", "right", "wrong"), SETS, ids=["number", "exact", "json", "regex", "choice"]
)
def test_graders_give_no_false_verdict(
    grader: type[Grader], right: list[Case], wrong: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regex, "SECONDS", 0.1)
    refused = [case for case in right if not grader(**_options(case)).grade(*case[:2]).score]
    accepted = [case for case in wrong if grader(**_options(case)).grade(*case[:2]).score]
    assert (refused, accepted) == ([], [])


def test_there_are_enough_right_and_wrong_answers() -> None:
    assert sum(len(right) for _, right, _ in SETS) >= 290
    assert sum(len(wrong) for _, _, wrong in SETS) >= 250


# Separated by "|".
_WORDS = (
    "answer is |\\boxed{|}|**|(|)|C| or |5|,|.|-|/|^|\\frac|{3}|%|\n|e9|not |= |```|json\n|"
    '{|"a"|:|[|]|½|⁵|٤|x|\ud800|million|twenty|####|A|I '
)
_PIECES = st.sampled_from(_WORDS.split("|"))
_TEXTS = st.one_of(st.text(max_size=60), st.lists(_PIECES, max_size=25).map("".join))


@settings(max_examples=80, deadline=None)
@given(_TEXTS)
def test_no_answer_raises(text: str) -> None:
    for verdict in (
        Number().grade(text, 5), Exact().grade(text, "x"), Choice().grade(text, "C"),
        Choice(**CHOICES).grade(text, "C"), JsonSchema().grade(text, answers.PERSON),
        Regex().grade(text, "x+"),
    ):  # fmt: skip
        assert isinstance(verdict, Outcome)


_REPEATED = (
    "1|1,|1 111|answer is |\\boxed{|\\text{|{|(|**|```\n|\\frac{1}|- | |\n|A) |[|C or |not |="
    '|1=|1+1=|e|1/|twenty |{"a":|⁵|a|x^|answer|\\sqrt|"'
)


@pytest.mark.parametrize("piece", _REPEATED.split("|"))
def test_long_answers_are_graded_fast(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regex, "SECONDS", 0.02)
    text = piece * (MAX_CHARS // len(piece))
    graders: list[tuple[Grader, Any]] = [
        (Number(), 5), (Exact(), "x"), (Choice(), "C"), (JsonSchema(), answers.PERSON), (Regex(), "(a+)+b"),
    ]  # fmt: skip
    for grader, target in graders:
        began = time.process_time()
        grader.grade(text, target)
        assert time.process_time() - began < 2, grader
