"""MMLU in a chat without examples, as the task ``mmlu_cot_llama`` of lm-evaluation-harness asks it.

Template and pattern are those of ``lm_eval/tasks/llama3/instruct/mmlu_cot`` in lm_eval 0.4.13 (MIT). Of the
harness's forms of MMLU it is the one for models that reason in a chat: others compare log-probabilities of
letters after the bare question, or expect the answer to be one letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chorale.errors import ConfigError
from chorale_evals.data import HubFile, Row, WebFile, data_folder, digest, load_rows, text_id, unique
from chorale_evals.task import Breakdown, Message, Outcome, Sample, Scored
from chorale_evals.tasks.harness import NO_MATCH, exact_match, extract
from chorale_evals.tasks.mmlu_subjects import CATEGORIES
from chorale_evals.tasks.patterns import compiled
from chorale_evals.tasks.question import GREEDY, QuestionTask, user

_SHA256 = "74a41822ce7d3def56e1682f958469c04642a5336a5ce912fa375fdb90fb25d7"
# The first needs pyarrow; the second, OpenAI's copy of the test questions, has columns of its own.
SOURCES = (
    HubFile(
        "cais/mmlu",
        "all/test-00000-of-00001.parquet",
        "test",
        "c30699e8356da336a370243923dbaf21066bb9fe",
        _SHA256,
    ),
    WebFile("https://openaipublic.blob.core.windows.net/simple-evals/mmlu.csv", "mmlu"),
)
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
    defaults = GREEDY

    def messages(self, sample: Sample, repeat: int) -> list[Message]:
        """Returns the question with its choices."""
        question = sample.question
        choices = dict(zip("ABCD", question["choices"], strict=True))
        return [user(_TEMPLATE.format(question=question["question"].strip(), **choices))]

    def grade(self, sample: Sample, repeat: int, text: str) -> Outcome:
        """Compares the letter of the last "best answer is"."""
        letter = extract(_ANSWER, text, -1)
        right = exact_match(letter, sample.target, ignore_punctuation=True)
        return Outcome(float(right), None if letter == NO_MATCH else letter)

    def breakdowns(self, scored: Sequence[Scored]) -> list[Breakdown]:
        """Returns the score of each category and of each subject."""
        categories: dict[str, list[float]] = {}
        for one in scored:
            name = CATEGORIES.get(one.sample.group, "other")
            categories.setdefault(name, []).append(one.outcome.score)
        rows = [Breakdown(name, sum(s) / len(s), len(s)) for name, s in sorted(categories.items())]
        return rows + super().breakdowns(scored)


def mmlu(*, data: Path | None = None, limit: int | None = None, seed: int = 0) -> Mmlu:
    """Makes the task."""
    rows = [_uniform(row) for row in load_rows(SOURCES, data_folder(Mmlu.name, data))]
    names = unique(text_id(row["subject"], row["question"], *row["choices"]) for row in rows)
    samples = []
    for name, row in zip(names, rows, strict=True):
        choices = list(row["choices"])
        samples.append(
            Sample(
                id=name,
                question={"question": row["question"], "choices": choices},
                target="ABCD"[int(row["answer"])],
                group=str(row["subject"]),
            )
        )
    return Mmlu(samples, limit=limit, seed=seed, data_revision=digest(rows))


def _uniform(row: Row) -> Row:
    """Returns the hub's columns, made from either source."""
    if "Question" in row:
        row = {
            "question": row["Question"],
            "subject": row["Subject"],
            "choices": [row[letter] for letter in "ABCD"],
            "answer": "ABCD".find(str(row["Answer"])),
        }
    missing = [name for name in ("question", "subject", "choices", "answer") if row.get(name) is None]
    if missing or len(row["choices"]) != 4 or int(row["answer"]) not in range(4):
        raise ConfigError(f"mmlu: a row is not a question with four choices and an answer: {str(row)[:200]}")
    return row
