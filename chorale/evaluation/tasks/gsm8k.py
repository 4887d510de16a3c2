"""GSM8K as SemiAnalysis' InferenceX runs it with lm-evaluation-harness: five examples as turns of a chat.

Template and patterns are those of ``utils/evals/gsm8k.yaml`` of InferenceX (Apache-2.0): the task ``gsm8k``
of lm-evaluation-harness (MIT) with one more sentence in the question, which names the format of the answer.
Published scores of gpt-oss-120b were measured with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chorale.evaluation.data import HubFile, Row, WebFile, data_folder, digest, load_rows, text_id, unique
from chorale.evaluation.task import Breakdown, Message, Outcome, Sample, Scored
from chorale.evaluation.tasks.harness import exact_match, extract, until
from chorale.evaluation.tasks.patterns import compiled
from chorale.evaluation.tasks.question import GREEDY, FewShotTask, user

_HUB = ("openai/gsm8k", "e53f048856ff4f594e959d75785d2c2d37b678ee")
_WEB = (
    "https://raw.githubusercontent.com/openai/grade-school-math/"
    "3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data"
)
# The first needs pyarrow; the second has the same rows in the same order.
SOURCES = {
    split: (
        HubFile(_HUB[0], f"main/{split}-00000-of-00001.parquet", split, _HUB[1]),
        WebFile(f"{_WEB}/{split}.jsonl", split),
    )
    for split in ("test", "train")
}
_TEMPLATE = (
    "Question: {question}\n"
    "End your response with the answer on the last line, formatted as: #### [number]\nAnswer:"
)
_STOPS = ("</s>", "<|im_end|>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "\u202e")
_STRICT = compiled(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = compiled(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")
_NUM_SHOTS = 5
_SEED = 1234  # the harness's default for drawing examples


class Gsm8k(FewShotTask):
    """The score is the harness's ``exact_match,strict-match``; ``flexible-extract`` is a breakdown."""

    name = "gsm8k"
    version = "InferenceX gsm8k.yaml, lm_eval 0.4.13"
    metric = "exact_match,strict-match"
    notes = "Stop strings are applied to the final text here instead of being sent to the server."
    defaults = GREEDY

    def ask(self, question: Row) -> Message:
        return user(_TEMPLATE.format(question=question["question"]))

    def solution(self, row: Row) -> str:
        return str(row["answer"])

    def grade(self, sample: Sample, repeat: int, text: str) -> Outcome:
        """Compares the number behind ``####``, and apart from it the last number of the text."""
        text = until(text, _STOPS)
        strict, flexible = extract(_STRICT, text, -1), extract(_FLEXIBLE, text, -1)
        right = exact_match(strict, sample.target, ignored=_IGNORED)
        detail = {"flexible": exact_match(flexible, sample.target, ignored=_IGNORED), "last_number": flexible}
        return Outcome(float(right), strict, detail)

    def breakdowns(self, scored: Sequence[Scored]) -> list[Breakdown]:
        """Returns the score by the last number of each text."""
        found = [bool(one.outcome.detail["flexible"]) for one in scored if "flexible" in one.outcome.detail]
        if not found:
            return []
        return [Breakdown("exact_match,flexible-extract", sum(found) / len(found), len(found))]


def gsm8k(*, data: Path | None = None, limit: int | None = None, seed: int = 0) -> Gsm8k:
    """Makes the task."""
    folder = data_folder(Gsm8k.name, data)
    columns = ("question", "answer")
    test = load_rows(SOURCES["test"], folder, columns=columns)
    train = load_rows(SOURCES["train"], folder, columns=columns)
    draw = random.Random(_SEED)
    shots: dict[str, list[Any]] = {}
    samples = []
    for name, row in zip(unique(text_id(row["question"]) for row in test), test, strict=True):
        sample = Sample(id=name, question={"question": row["question"]}, target=row["answer"])
        shots[sample.id] = draw.sample(train, _NUM_SHOTS)
        samples.append(sample)
    return Gsm8k(samples, shots, limit=limit, seed=seed, data_revision=digest([*test, *train]))
