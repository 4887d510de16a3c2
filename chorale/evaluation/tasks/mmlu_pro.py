"""MMLU-Pro as the task ``mmlu_pro`` of lm-evaluation-harness asks it: five solved examples per category.

Templates and pattern are those of ``lm_eval/tasks/mmlu_pro`` in lm_eval 0.4.13 (MIT).
"""

from __future__ import annotations

from pathlib import Path

from chorale.errors import ConfigError
from chorale.evaluation.data import HubFile, Row, data_folder, digest, load_rows
from chorale.evaluation.task import Message, Outcome, Sample
from chorale.evaluation.tasks.harness import NO_MATCH, exact_match, extract, until
from chorale.evaluation.tasks.patterns import compiled
from chorale.evaluation.tasks.question import GREEDY, FewShotTask, user

_HUB = ("TIGER-Lab/MMLU-Pro", "b189ec765aa7ed75c8acfea42df31fdae71f97be")
TEST = HubFile(
    _HUB[0],
    "data/test-00000-of-00001.parquet",
    "test",
    _HUB[1],
    "0e24a191921c2f453518a537a8b2117bd137e7714d4ef1565e9ba06c1ecb9ad8",
)
VALIDATION = HubFile(_HUB[0], "data/validation-00000-of-00001.parquet", "validation", _HUB[1])
_LETTERS = "ABCDEFGHIJ"
_DESCRIPTION = (
    "The following are multiple choice questions (with answers) about {category}. Think step by step and "
    'then finish your answer with "the answer is (X)" where X is the correct letter choice.\n'
)
_THINK = "Let's think step by step."
_STOPS = ("Question:",)
_ANSWER = compiled(r"answer is \(?([ABCDEFGHIJ])\)?")
_NUM_SHOTS = 5


class MmluPro(FewShotTask):
    """The category is in a system message, each example is a turn."""

    name = "mmlu_pro"
    version = "mmlu_pro, lm_eval 0.4.13"
    metric = "exact_match,custom-extract"
    notes = (
        "The harness limits answers to 2,048 tokens; here the limit is that of the run. Stop strings are "
        "applied to the final text here instead of being sent to the server."
    )
    defaults = GREEDY

    def messages(self, sample: Sample, repeat: int) -> list[Message]:
        """Returns the description, the examples of the category as turns, and the question."""
        description: Message = {"role": "system", "content": _DESCRIPTION.format(category=sample.group)}
        return [description, *super().messages(sample, repeat)]

    def shots_of(self, sample: Sample) -> str:
        return sample.group

    def ask(self, question: Row) -> Message:
        options = "".join(
            f"{letter}. {text.strip()}\n" for letter, text in zip(_LETTERS, question["options"], strict=False)
        )
        return user(f"Question:\n{question['question']}\nOptions:\n{options}Answer: {_THINK}")

    def solution(self, row: Row) -> str:
        return str(row["cot_content"]).replace(f"A: {_THINK} ", "")

    def grade(self, sample: Sample, repeat: int, text: str) -> Outcome:
        """Compares the letter of the first "answer is"."""
        letter = extract(_ANSWER, until(text, _STOPS))
        right = exact_match(letter, sample.target, ignore_punctuation=True)
        return Outcome(float(right), None if letter == NO_MATCH else letter)


def mmlu_pro(*, data: Path | None = None, limit: int | None = None, seed: int = 0) -> MmluPro:
    """Makes the task."""
    folder = data_folder(MmluPro.name, data)
    columns = ("question", "options", "answer", "category")
    test = load_rows(TEST, folder, columns=("question_id", *columns))
    examples = load_rows(VALIDATION, folder, columns=(*columns, "cot_content"))
    shots: dict[str, list[Row]] = {}
    for row in examples:
        shots.setdefault(row["category"], []).append(row)
    samples = [
        Sample(
            id=str(row["question_id"]),
            question={"question": row["question"], "options": list(row["options"])},
            target=row["answer"],
            group=row["category"],
        )
        for row in test
    ]
    for category in {sample.group for sample in samples}:
        if len(shots.get(category, ())) < _NUM_SHOTS:
            raise ConfigError(f"mmlu_pro: the validation file has fewer than 5 examples of {category!r}")
        shots[category] = shots[category][:_NUM_SHOTS]
    return MmluPro(samples, shots, limit=limit, seed=seed, data_revision=digest([*test, *examples]))
