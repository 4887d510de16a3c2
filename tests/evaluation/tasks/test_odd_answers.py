"""Answers that look wrong and are right, and the other way round, as a person would judge them.

The graders are those that published scores were measured with, faults included. Where these give a false
verdict, ours gives it too, or scores would not compare: ``FAULTS`` lists some.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from chorale.evaluation.task import Reply, Sample
from chorale.evaluation.tasks import make_task, patterns
from chorale.evaluation.tasks.abcd import extract_abcd
from chorale.evaluation.tasks.aime25 import extract_boxed
from chorale.evaluation.tasks.ifeval.instructions import CHECKS, strict
from chorale.evaluation.tasks.ifeval.parameters import built_in

RIGHT = {
    "aime25": [  # 204
        "\\boxed{204}", "\\boxed{ 204 }", "$$\\boxed{204}.$$", "First \\boxed{12}, but no: \\boxed{204}",
        "\\boxed{0204}",
        "\\framebox{204}", "\\boxed{m+n, 204}", "The answer is 204", "**204**",
        "\\boxed{}\\boxed{204}\\boxed{}",
        "It is \\boxed{204\n}", "x = 12, hence 204.", "\\boxed{+204}", "\\fbox{204}", "ans: ２０４ = 204",
    ],
    "gsm8k": [  # 1,204
        "#### 1204", "#### 1,204", "So 1,204 rolls.\n#### 1204", "#### 1204.",
        "Then #### 7? No.\n#### 1204", "#### 1204\n",
        "**Answer**\n#### 1204 ", "a #### 1204 b", "#### 12,04", "text #### 1204</s>#### 9",
    ],
    "mmlu": [  # C
        "The best answer is C.", "The best answer is C", "best answer is A... no, the best answer is C",
        "## Step 1\nThe best answer is C: rain", "Thebest answer is C", "The best answer is C) rain",
    ],
    "mmlu_pro": [  # H
        "The answer is (H).", "the answer is H", "So the answer is (H) and not (A).", "answer is (H",
        "The answer is H)",
        "the answer is (H). Question: next? the answer is (B)", "My answer is H.",
    ],
}  # fmt: skip
WRONG = {
    "aime25": [
        "\\boxed{20}4", "\\boxed{2040}", "\\boxed{204.5}", "\\boxed{-204}", "\\boxed{x=204}", "",
        "\\boxed{two hundred four}",
        "204, or rather 203", "\\boxed{204} and then \\boxed{205}", "\\boxed{204, 7}",
        "\\boxed{204^\\circ}", "I do not know.",
        "\\boxed{\\frac{408}{2}}", "\\boxed{20 4}",
    ],
    "gsm8k": [
        "#### 120", "####1204", "The answer is 1204", "#### 1204.5", "#### -1204", "#### 1204\n#### 7",
        "", "1204 ####", "#### one",
        "#### $1204", "# 1204",
    ],
    "mmlu": [
        "C", "The answer is C.", "The best answer is D",
        "The best answer is C. No: the best answer is B.", "", "(C)",
        "The best answer is: C", "The best answer is **C**", "the best answer is c", "The BEST ANSWER IS C",
    ],
    "mmlu_pro": [
        "H", "The answer: H", "the answer is (A), or the answer is (H)", "", "The answer is **H**",
        "the answer is h",
        "the answer is K", "Question: the answer is (H)", "The answer is: (H)",
    ],
}  # fmt: skip
TARGETS: dict[str, Any] = {"aime25": 204, "gsm8k": "It is so.\n#### 1,204", "mmlu": "C", "mmlu_pro": "H"}
ABCD = {
    "B": [
        "B", "B.", "(B)", "**B**", "Answer: B", "**Answer:** B", "**Answer: B**",
        "answer is A? No.\nAnswer: B", "\\boxed{B}",
        "\\boxed{\\text{B}}", "The final answer is \\boxed{\\textbf{(B)}}.", "Option B", "**B) 4 mol**",
        "Choice: B", "Answer\nB",
        "B) 4 mol, since two molecules form", "[B]", "answers: (b)", "It follows.\n\n**B**\n",
    ],
    "": [""],
}  # fmt: skip


class _Silent:
    """A session that answers with one text."""

    def __init__(self, text: str) -> None:
        self._reply = Reply(text, finish_reason="length")

    async def ask(self, *_: Any, **__: Any) -> Reply:
        return self._reply


def _score(name: str, text: str) -> float:
    task: Any = make_task(name, data=Path("sample"))
    return float(task.grade(Sample("1", "", TARGETS[name]), 0, text).score)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in RIGHT.items() for text in texts])
def test_right_in_an_odd_form(name: str, text: str) -> None:
    assert _score(name, text) == 1.0


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts])
def test_wrong_though_it_looks_right(name: str, text: str) -> None:
    assert _score(name, text) == 0.0


@pytest.mark.parametrize(
    ("letter", "text"), [(letter, text) for letter, texts in ABCD.items() for text in texts]
)
def test_letters_in_odd_forms(letter: str, text: str) -> None:
    assert extract_abcd(text) == letter


def test_gpqa_grades_the_letter_of_this_repeat() -> None:
    task: Any = make_task("gpqa_diamond", data=Path("sample"))
    for sample in task.samples():
        for repeat in range(9):
            letter = "ABCD"[task.order(sample, repeat).index(0)]
            assert f"({letter}) {sample.target}\n" in task.messages(sample, repeat)[0]["content"]
            scores = {other: task.grade(sample, repeat, f"Answer: {other}").score for other in "ABCD"}
            assert scores == {other: float(other == letter) for other in "ABCD"}


# (published grader, text, what it reads): false verdicts that ours shares.
FAULTS = [
    ("abcd", "A careful look shows that the answer must be the third.", "A"),
    ("abcd", "Option A is wrong. The correct one is **D**.", "A"),
    ("abcd", "I can not tell.", "I"),
    ("abcd", "*Answer* – B", "A"),
    ("boxed", "\\boxed{\\frac{204}{1}}", "\\frac{204"),
    ("boxed", "The answer is 204 (see step 3)", "3"),
]


@pytest.mark.parametrize(("grader", "text", "read"), FAULTS)
def test_known_faults_of_the_published_graders_are_kept(grader: str, text: str, read: str) -> None:
    assert {"abcd": extract_abcd, "boxed": extract_boxed}[grader](text) == read


def test_ifeval_sample_is_graded_both_ways() -> None:
    pytest.importorskip("langdetect")
    task: Any = make_task("ifeval", data=Path("sample"))
    good = {
        "1": "Salt and wind. A wave and another wave.",
        "2": "Trees are bare, the fields are white, the rivers freeze.",
        "3": "Herzlich willkommen in unserem Haus, wir freuen uns sehr auf Sie.",
        "4": "It rains. Mr. Li is wet. He runs.",
        "5": "*Oaks* are old.\n***\nFirs are green.", "6": "Bread is old.\n\nFlour is milled.\n\nEat.",
        "7": "<<Letter>>\nDear [name], in [town] all is well.\nP.S. Write.",
        "8": "* fig\n* pear\n- plum\nEnjoy your meal.",
        "9": "My answer is yes.",
        "10": '```json\n{"colours": ["red"]}\n```', "11": "SECTION 1\nMorning.\nSECTION 2\nNight.",
        "12": '"Tom ****** Mia"', "13": "Name a river. The Rhine.",
        "14": "THE CLOUDS ARE SLOWLY MOVING OVER THE HILLS.",
        "15": "the hills are green and they roll down to the sea.", "16": "STOP! The ICE is thin.",
    }  # fmt: skip
    bad = {
        "1": "Salt, wind, wave, wave", "2": "It is cold eeeeeeeeee",
        "3": "Welcome to our house, we look forward to it.",
        "4": "It rains. Mr. Li is wet.", "5": "*Oaks* are old.", "6": "Bread\n\nflours\n\nEat",
        "7": "<<>> [name] [town] PS.",
        "8": "* fig\n* pear\nEnjoy your meal.", "9": "Yes.", "10": "{red}", "11": "SECTION 1 only",
        "12": '"Tom and Mia"',
        "13": "The Rhine. Name a river.", "14": "The clouds are moving.", "15": "The hills are green.",
        "16": "STOP the ice.",
    }  # fmt: skip
    for sample in task.samples():
        outcome = task.grade(sample, 0, good[sample.id])
        assert outcome.score == 1.0, (sample.id, outcome.detail)
        assert outcome.detail["loose"]
        assert task.grade(sample, 0, bad[sample.id]).score == 0.0, sample.id
        assert task.grade(sample, 0, " \n").score == 0.0


def test_ifeval_without_an_argument_is_wrong_and_says_so() -> None:
    pytest.importorskip("langdetect")
    task: Any = make_task("ifeval", data=Path("sample"))
    target = [{"id": "keywords:frequency", "arguments": {"keyword": "a"}}]
    outcome = task.grade(Sample("1", "", target), 0, "a a")
    assert outcome.score == 0.0
    assert "no usable argument" in outcome.detail["instructions"][0]["reason"]


def test_an_answer_that_was_cut_says_so() -> None:
    task: Any = make_task("gsm8k", data=Path("sample"))
    outcome = asyncio.run(task.run(task.samples()[0], 0, _Silent("1 + 1 = 2, so" * 4000)))
    assert (outcome.score, outcome.detail["reason"]) == (0.0, "the answer was cut at the token limit")


LOOPS = [
    "\n" * 50_000, " \n" * 30_000, "Answer:" + " " * 50_000, "\\boxed{A" * 9_000, "\\boxed{" * 9_000,
    "[" * 60_000, "<<" * 30_000,
    "* " * 30_000, "*\n" * 30_000, "a." * 20_000, "." * 20_000, "p. " * 10_000, '{"a":' * 20_000,
    "[" * 30_000 + "]" * 30_000,
]  # fmt: skip
ARGUMENTS = {
    "keywords": ["a"], "keyword": "a", "frequency": 1, "relation": "at least",
    "forbidden_words": ["b"], "letter": "a",
    "let_relation": "at least", "let_frequency": 1, "language": "en",
    "num_sentences": 2, "num_paragraphs": 1, "num_words": 3,
    "nth_paragraph": 1, "first_word": "a", "num_placeholders": 1, "postscript_marker": "P.S.",
    "num_bullets": 1,
    "num_highlights": 1, "section_spliter": "Section", "num_sections": 1, "prompt_to_repeat": "a",
    "end_phrase": "a",
    "capital_relation": "at least", "capital_frequency": 1,
}  # fmt: skip


@pytest.mark.parametrize("place", range(len(LOOPS)))
def test_a_looping_model_does_not_stop_the_run(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published patterns take minutes to hours on some of these."""
    monkeypatch.setattr(patterns, "SECONDS", 0.02)
    text = LOOPS[place]
    began = time.monotonic()
    extract_abcd(text)
    extract_boxed(text)
    for name in TARGETS:
        _score(name, text)
    for name in CHECKS:
        if "language" not in name and "english" not in name:
            strict(name, ARGUMENTS, text, built_in())
    assert time.monotonic() - began < 20
