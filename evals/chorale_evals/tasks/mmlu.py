"""MMLU in a chat without examples, as the task ``mmlu_cot_llama`` of lm-evaluation-harness asks it.

Template and pattern are those of ``lm_eval/tasks/llama3/instruct/mmlu_cot`` in lm_eval 0.4.13 (MIT). Of the
harness's forms of MMLU it is the one for models that reason in a chat: others compare log-probabilities of
letters after the bare question, or expect the answer to be one letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from chorale.errors import ConfigError
from chorale_evals.data import Source, data_folder, digest, load_rows, text_id, unique
from chorale_evals.graders.patterns import compiled, everything
from chorale_evals.task import Breakdown, Outcome, Sample, by_group
from chorale_evals.tasks.mmlu_subjects import CATEGORIES
from chorale_evals.tasks.question import QuestionTask

# OpenAI's copy of the test questions. The hub has them as Parquet only, for which this package has no reader.
SOURCE = Source("https://openaipublic.blob.core.windows.net/simple-evals/mmlu.csv")
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


class Mmlu(QuestionTask):
    """Breakdowns are the harness's four groups of subjects, then the subjects."""

    name = "mmlu"
    version = "mmlu_cot_llama, lm_eval 0.4.13"
    metric = "exact_match,strict_match"
    notes = "The harness limits answers to 1,024 tokens; here the limit is that of the run."
    defaults = MappingProxyType({"temperature": 0.0})

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


def mmlu(*, data: Path | None = None, limit: int | None = None, seed: int = 0) -> Mmlu:
    """Makes the task."""
    columns = ("Question", "Subject", "Answer", *"ABCD")
    rows = load_rows(SOURCE, data_folder(Mmlu.name, data), columns)
    if wrong := next((row for row in rows if row["Answer"] not in tuple("ABCD")), None):
        raise ConfigError(f"mmlu: the answer of a row is no letter from A to D: {str(wrong)[:200]}")
    choices = [[row[letter] for letter in "ABCD"] for row in rows]
    names = unique(
        text_id(row["Subject"], row["Question"], *each) for row, each in zip(rows, choices, strict=True)
    )
    samples = [
        Sample(name, {"question": row["Question"], "choices": each}, row["Answer"], row["Subject"])
        for name, row, each in zip(names, rows, choices, strict=True)
    ]
    return Mmlu(samples, limit, seed, digest(rows))
