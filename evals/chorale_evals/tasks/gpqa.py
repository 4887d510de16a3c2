"""GPQA Diamond as ``gpt_oss.evals`` runs it: choices in a seeded random order, redrawn in each repeat.

The template is that of ``gpt_oss/evals/gpqa_eval.py`` in gpt-oss 0.0.9 (Copyright OpenAI, Apache-2.0).
"""

from __future__ import annotations

import random
from typing import Any

from chorale_evals.data import Source
from chorale_evals.task import Outcome, Sample
from chorale_evals.tasks.abcd import extract_abcd
from chorale_evals.tasks.published import PublishedTask

_SHA256 = "41d1213cd7a4998605a26c2798500652572007161b3a92817ba46b35befcd305"
# The copy that gpt_oss.evals reads: the order of its rows decides the order of the choices.
SOURCE = Source("https://openaipublic.blob.core.windows.net/simple-evals/gpqa_diamond.csv", _SHA256)
_TEMPLATE = """
{Question}

(A) {A}
(B) {B}
(C) {C}
(D) {D}

Express your final answer as the corresponding option 'A', 'B', 'C', or 'D'.
""".strip()
_CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


class Gpqa(PublishedTask):
    """Each sample's question contains its choices, the correct one first; ``order`` permutes them."""

    name = "gpqa_diamond"
    version = "gpt_oss.evals 0.0.9"
    repeats = 8
    sources = (SOURCE,)
    columns = ("Question", *_CHOICES)

    def __init__(self, samples: list[Sample], limit: int | None, seed: int, data_revision: str) -> None:
        super().__init__(samples, limit, seed, data_revision)
        self._indices = {sample.id: index for index, sample in enumerate(samples)}
        self._random, self._orders = random.Random(0), list[list[int]]()

    @classmethod
    def row_id(cls, row: dict[str, Any]) -> str:
        return str(row.get("Record ID") or super().row_id(row))

    @classmethod
    def sample(cls, name: str, row: dict[str, Any]) -> Sample:
        question = {"question": row["Question"], "choices": [row[choice] for choice in _CHOICES]}
        return Sample(name, question, row["Correct Answer"], str(row.get("High-level domain") or ""))

    def order(self, sample: Sample, repeat: int) -> list[int]:
        """Returns the permutation that ``gpt_oss.evals`` draws for this repeat of the whole data set."""
        index = repeat * len(self._indices) + self._indices[sample.id]
        while len(self._orders) <= index:
            self._orders.append(self._random.sample(range(4), 4))
        return self._orders[index]

    def prompt(self, sample: Sample, repeat: int) -> str:
        """Returns the question with its choices in the order of this repeat."""
        choices = self._choices(sample, repeat)
        filled = {"Question": sample.question["question"], **dict(zip("ABCD", choices, strict=True))}
        return _TEMPLATE.format(**filled)

    def grade(self, sample: Sample, repeat: int, text: str) -> Outcome:
        """Compares letters."""
        correct = "ABCD"[self._choices(sample, repeat).index(sample.target)]
        letter = extract_abcd(text)
        return Outcome(float(letter == correct), letter or None, {"correct": correct})

    def _choices(self, sample: Sample, repeat: int) -> list[str]:
        return [sample.question["choices"][i] for i in self.order(sample, repeat)]
