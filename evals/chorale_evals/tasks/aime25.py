"""AIME 2025, both papers, as ``gpt_oss.evals`` runs it.

Template and patterns are those of ``gpt_oss/evals/aime_eval.py`` in gpt-oss 0.0.9 (Copyright OpenAI,
Apache-2.0).
"""

from __future__ import annotations

import re
from typing import Any

from chorale.errors import ConfigError
from chorale_evals.data import Source
from chorale_evals.graders.regex import compiled, everything
from chorale_evals.task import Outcome, Sample
from chorale_evals.tasks.published import PublishedTask

_REVISION = "a6ad95f611d72cf628a80b58bd0432ef6638f958"
_HUB = f"https://huggingface.co/datasets/opencompass/AIME2025/resolve/{_REVISION}"
SOURCES = (Source(f"{_HUB}/aime2025-I.jsonl"), Source(f"{_HUB}/aime2025-II.jsonl"))
_TEMPLATE = """
{question}
Please reason step by step, and put your final answer within \\boxed{{}}.
"""
_BOXED = compiled(r"boxed{(.*?)}|framebox{(.*?)}", re.DOTALL)
_DIGITS = compiled(r"\d+")


def extract_boxed(text: str) -> str:
    """Returns the text after the last comma in the last non-empty box, else the last digits, or ""."""
    # No box ends after the last brace, so each search there would run to the end of the text.
    for match in reversed(everything(_BOXED, text[: text.rfind("}") + 1])):
        for group in match:
            if group:
                return str(group).split(",")[-1].strip()
    digits = everything(_DIGITS, text)
    return str(digits[-1]) if digits else ""


class Aime25(PublishedTask):
    """Answers are integers; any other answer is wrong."""

    name = "aime25"
    version = "gpt_oss.evals 0.0.9"
    repeats = 8
    sources = SOURCES
    columns = ("question", "answer")

    @classmethod
    def sample(cls, name: str, row: dict[str, Any]) -> Sample:
        """The target is the digits at the start of an answer such as ``336^\\circ``."""
        digits = re.match(r"\d+", str(row["answer"]))
        if digits is None:
            raise ConfigError(f"aime25: the answer {row['answer']!r} does not start with digits")
        return Sample(name, row["question"], int(digits.group()))

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
