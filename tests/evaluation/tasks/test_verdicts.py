"""Reading and grading of answers: equal to that of gpt_oss.evals and lm-evaluation-harness, text by text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from chorale.evaluation.task import Sample
from chorale.evaluation.tasks import abcd, aime25, gsm8k, make_task, mmlu, mmlu_pro
from chorale.evaluation.tasks.ifeval.instructions import CHECKS, loose, strict
from chorale.evaluation.tasks.ifeval.parameters import built_in, read_parameters
from chorale.evaluation.tasks.ifeval.punkt import Parameters, split_sentences
from chorale.evaluation.tasks.ifeval.words import count_words, tokens
from tests.evaluation.tasks import record
from tests.evaluation.tasks.texts import Case, cases

_NO_MATCH = "[invalid]"


def _sample(case: Case) -> Sample:
    return Sample("1", "", case["target"])


def _by_task(task: Any, case: Case) -> Any:
    return task.grade(_sample(case), 0, case["text"])


def _abcd(case: Case, _: Parameters) -> Any:
    return abcd.extract_abcd(case["text"])


def _aime25(case: Case, _: Parameters) -> Any:
    task = aime25.Aime25([], limit=None, seed=0, data_revision="")
    return [aime25.extract_boxed(case["text"]), bool(_by_task(task, case).score)]


def _gsm8k(case: Case, _: Parameters) -> Any:
    outcome = _by_task(gsm8k.Gsm8k([], {}, limit=None, seed=0, data_revision=""), case)
    detail = outcome.detail
    return [[outcome.answer, detail["last_number"]], [bool(outcome.score), detail["flexible"]]]


def _mmlu(case: Case, _: Parameters) -> Any:
    outcome = _by_task(mmlu.Mmlu([], limit=None, seed=0, data_revision=""), case)
    return [[outcome.answer or _NO_MATCH], [bool(outcome.score)]]


def _mmlu_pro(case: Case, _: Parameters) -> Any:
    outcome = _by_task(mmlu_pro.MmluPro([], {}, limit=None, seed=0, data_revision=""), case)
    return [[outcome.answer or _NO_MATCH], [bool(outcome.score)]]


def _ifeval(case: Case, parameters: Parameters) -> Any:
    text = case["text"]
    verdicts = [
        "".join("01"[check(name, arguments, text, parameters)] for name, arguments in case["instructions"])
        for check in (strict, loose)
    ]
    return {
        "strict": verdicts[0],
        "loose": verdicts[1],
        "sentences": len(split_sentences(text, parameters)),
        "words": count_words(text),
        "capitals": sum(token.isupper() for token in tokens(text, parameters)),
    }


GRADERS = {"abcd": _abcd, "aime25": _aime25, "gsm8k": _gsm8k, "mmlu": _mmlu, "mmlu_pro": _mmlu_pro}
GRADERS["ifeval"] = _ifeval
# (python, NLTK's folder) of an environment with both packages, from tests/acceptance/clients/install.sh.
INSTALLED = (os.environ.get("CHORALE_GRADERS_PYTHON", ""), os.environ.get("CHORALE_GRADERS_NLTK", ""))
needs_packages = pytest.mark.skipif(
    not all(INSTALLED), reason="CHORALE_GRADERS_PYTHON names no environment (install.sh)"
)


def _differences(cases: list[Case], verdicts: list[Any], parameters: Parameters, kind: str) -> list[Any]:
    return [
        (case, verdict, ours)
        for case, verdict in zip(cases, verdicts, strict=True)
        if case["kind"] == kind and (ours := GRADERS[kind](case, parameters)) != verdict
    ]


@pytest.mark.parametrize("kind", list(GRADERS))
def test_verdicts_are_those_that_were_recorded(kind: str) -> None:
    if kind == "ifeval":
        pytest.importorskip("langdetect")
    given, verdicts, parameters = record.read()
    assert sum(case["kind"] == kind for case in given) >= 150
    assert _differences(given, verdicts, parameters, kind) == []


def test_the_recorded_texts_cover_all_instructions_both_ways() -> None:
    given, verdicts, _ = record.read()
    seen = {
        (name, verdict["strict"][place])
        for case, verdict in zip(given, verdicts, strict=True)
        if case["kind"] == "ifeval"
        for place, (name, _) in enumerate(case["instructions"])
    }
    assert seen == {(name, verdict) for name in CHECKS for verdict in "01"}
    assert len(CHECKS) == 25


def test_the_built_in_parameters_change_few_counts() -> None:
    """The figures of docs/evaluation.md. The texts are made of what sentence splitters get wrong."""
    given, verdicts, _ = record.read()
    mine = built_in()
    other = {"sentences": 0, "capitals": 0}
    for case, verdict in zip(given, verdicts, strict=True):
        if case["kind"] == "ifeval":
            other["sentences"] += len(split_sentences(case["text"], mine)) != verdict["sentences"]
            other["capitals"] += sum(t.isupper() for t in tokens(case["text"], mine)) != verdict["capitals"]
    assert other == {"sentences": 11, "capitals": 0}


def _prompts(name: str, count: int) -> list[Any]:
    task = make_task(name, data=Path("sample"))
    samples = task.samples()
    return [task.messages(one, repeat) for repeat in range(count // len(samples)) for one in samples]


TASKS = ["gpqa_diamond", "aime25", "mmlu", "mmlu_pro", "gsm8k", "ifeval"]


@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_those_that_were_recorded(name: str) -> None:
    """The orders of GPQA's choices in 8 repeats included, and the examples that GSM8K draws."""
    if name == "ifeval":
        pytest.importorskip("langdetect")
    sent = record.read_prompts()[name]
    assert _prompts(name, len(sent)) == sent


@needs_packages
def test_prompts_are_those_of_the_installed_packages() -> None:
    assert record.prompts(*INSTALLED) == {
        name: _prompts(name, len(sent)) for name, sent in record.read_prompts().items()
    }


@needs_packages
@pytest.mark.parametrize("seed", [19, 1, 2])
def test_verdicts_are_those_of_the_installed_packages(seed: int) -> None:
    given = list(cases(seed))
    verdicts = record.reference(*INSTALLED, given)
    parameters = read_parameters(Path(INSTALLED[1], "tokenizers/punkt_tab.zip"))
    assert [one for kind in GRADERS for one in _differences(given, verdicts, parameters, kind)] == []
