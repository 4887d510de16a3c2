"""MMLU in a chat without examples, as the task ``mmlu_cot_llama`` of lm-evaluation-harness asks it.

Template and pattern are those of ``lm_eval/tasks/llama3/instruct/mmlu_cot`` in lm_eval 0.4.13 (MIT). Of the
harness's variants of MMLU it is the one for models that reason in a chat: the others compare
log-probabilities of letters after the bare question, or expect the answer to be one letter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from chorale.errors import ConfigError
from chorale_evals.data import Source, text_id
from chorale_evals.graders.regex import compiled, everything
from chorale_evals.task import Breakdown, Outcome, Sample, by_group
from chorale_evals.tasks.published import PublishedTask

# OpenAI's copy of the test questions. The hub has them only as Parquet, which this package cannot read.
SOURCE = Source("https://openaipublic.blob.core.windows.net/simple-evals/mmlu.csv")
# lm-evaluation-harness's four groups of subjects.
_GROUPS = json.loads(Path(__file__).with_name("mmlu_subjects.json").read_text("utf-8"))
CATEGORIES = {subject: name for name, subjects in _GROUPS.items() for subject in subjects}
_TEMPLATE = (
    "Given the following question and four candidate answers (A, B, C and D), choose the best answer.\n\n"
    "Question: {question}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\n"
    "- For simple problems:\nDirectly provide the answer with minimal explanation.\n\n"
    "- For complex problems:\nUse this step-by-step format:\n"
    "## Step 1: [Concise description]\n[Brief explanation]\n"
    "## Step 2: [Concise description]\n[Brief explanation]\n\n"
    "Regardless of the approach, always conclude with:\nThe best answer is [the_answer_letter].\n"
    "where the [the_answer_letter] is one of A, B, C or D.\n\nLet's think step by step."
)
_ANSWER = compiled(r"best answer is ([A-Z])")


class Mmlu(PublishedTask):
    """Breakdowns are the harness's four groups of subjects, then the subjects."""

    name = "mmlu"
    version = "mmlu_cot_llama, lm_eval 0.4.13"
    metric = "exact_match,strict_match"
    notes = "The harness limits answers to 1,024 tokens; here the run's limit applies."
    defaults = MappingProxyType({"temperature": 0.0})
    sources = (SOURCE,)
    columns = ("Question", "Subject", "Answer", *"ABCD")

    @classmethod
    def row_id(cls, row: dict[str, Any]) -> str:
        return text_id(row["Subject"], row["Question"], *(row[letter] for letter in "ABCD"))

    @classmethod
    def sample(cls, name: str, row: dict[str, Any]) -> Sample:
        if row["Answer"] not in tuple("ABCD"):
            raise ConfigError(f"mmlu: the answer of a row is not a letter from A to D: {str(row)[:200]}")
        question = {"question": row["Question"], "choices": [row[letter] for letter in "ABCD"]}
        return Sample(name, question, row["Answer"], row["Subject"])

    def prompt(self, sample: Sample, repeat: int) -> str:
        question = sample.question
        choices = dict(zip("ABCD", question["choices"], strict=True))
        return _TEMPLATE.format(question=question["question"].strip(), **choices)

    def grade(self, sample: Sample, repeat: int, text: str) -> Outcome:
        """Compares the letter of the last "best answer is"."""
        found = everything(_ANSWER, text)
        letter = str(found[-1]) if found else None
        return Outcome(float(letter == sample.target), letter)

    def breakdowns(self, scores: Sequence[tuple[str, float]]) -> list[Breakdown]:
        """Returns the score of each category and of each subject."""
        categories = by_group([(CATEGORIES.get(subject, "other"), score) for subject, score in scores])
        return categories + super().breakdowns(scores)
