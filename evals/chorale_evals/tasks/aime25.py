"""AIME 2025, both papers, as ``gpt_oss.evals`` runs it.

Template and patterns are those of ``gpt_oss/evals/aime_eval.py`` in gpt-oss 0.0.9 (Copyright OpenAI,
Apache-2.0).
"""

from __future__ import annotations

import re
from pathlib import Path

from chorale.errors import ConfigError
from chorale_evals.data import data_folder, digest, hub_file, load_rows, text_id, unique
from chorale_evals.graders.patterns import compiled, everything
from chorale_evals.task import Outcome, Sample
from chorale_evals.tasks.question import QuestionTask

_REVISION = "a6ad95f611d72cf628a80b58bd0432ef6638f958"
SOURCES = [
    hub_file("opencompass/AIME2025", _REVISION, f"{name}.jsonl") for name in ("aime2025-I", "aime2025-II")
]
_TEMPLATE = """
{question}
Please reason step by step, and put your final answer within \\boxed{{}}.
"""
_BOXED = compiled(r"boxed{(.*?)}|framebox{(.*?)}", re.DOTALL)
_DIGITS = compiled(r"\d+")


def extract_boxed(text: str) -> str:
    """Returns what follows the last comma in the last box that is not empty, else the last digits, or ""."""
    # Behind the last brace no box can end, and each search would run to the end of the text.
    for match in reversed(everything(_BOXED, text[: text.rfind("}") + 1])):
        for group in match:
            if group:
                return str(group).split(",")[-1].strip()
    digits = everything(_DIGITS, text)
    return str(digits[-1]) if digits else ""


class Aime25(QuestionTask):
    """Answers are integers; what does not read as one is wrong."""

    name = "aime25"
    version = "gpt_oss.evals 0.0.9"
    default_repeats = 8

    def prompt(self, sample: Sample, repeat: int) -> str:
        return _TEMPLATE.format(question=sample.question)

    def grade(self, sample: Sample, repeat: int, text: str) -> Outcome:
        """Compares integers."""
        found = extract_boxed(text)
        try:
            right = int(found) == sample.target
        except ValueError:
            right = False
        return Outcome(float(right), found[:200] or None)


def aime25(*, data: Path | None = None, limit: int | None = None, seed: int = 0) -> Aime25:
    """Makes the task."""
    folder = data_folder(Aime25.name, data)
    rows = [row for source in SOURCES for row in load_rows(source, folder, ("question", "answer"))]
    names = unique(text_id(row["question"]) for row in rows)
    samples = [
        Sample(id=name, question=row["question"], target=_integer(row["answer"]))
        for name, row in zip(names, rows, strict=True)
    ]
    return Aime25(samples, limit, seed, digest(rows))


def _integer(answer: object) -> int:
    """Returns the digits at the start of an answer such as ``336^\\circ``."""
    match = re.match(r"\d+", str(answer))
    if match is None:
        raise ConfigError(f"aime25: the answer {answer!r} does not start with digits")
    return int(match.group())
