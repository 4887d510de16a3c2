"""The task ``ifeval``: strict and loose verdicts, per prompt and per instruction."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chorale.errors import ConfigError
from chorale.evaluation.data import HubFile, data_folder, digest, load_rows, unique
from chorale.evaluation.task import Breakdown, Message, Outcome, Sample, Scored
from chorale.evaluation.tasks.ifeval import language
from chorale.evaluation.tasks.ifeval.instructions import CHECKS, loose, strict
from chorale.evaluation.tasks.ifeval.parameters import built_in, find_parameters
from chorale.evaluation.tasks.ifeval.punkt import Parameters
from chorale.evaluation.tasks.question import GREEDY, QuestionTask, user

SOURCE = HubFile(
    "google/IFEval", "ifeval_input_data.jsonl", "train", "966cd89545d6b6acfd7638bc708b98261ca58e84"
)
_NOTE = "The harness limits answers to 1,280 tokens; here the limit is that of the run."
_OWN_SPLITTER = (
    " Sentences are counted with the built-in abbreviations, not with NLTK's parameters (docs/evaluation.md)."
)


class Ifeval(QuestionTask):
    """The score is the harness's ``prompt_level_strict_acc``; the other three metrics are breakdowns."""

    name = "ifeval"
    version = "ifeval, lm_eval 0.4.13"
    metric = "prompt_level_strict_acc"
    defaults = GREEDY

    def __init__(
        self, samples: list[Sample], parameters: Parameters | None, *, limit: int | None, seed: int,
        data_revision: str,
    ) -> None:  # fmt: skip
        super().__init__(samples, limit=limit, seed=seed, data_revision=data_revision)
        self._parameters = built_in() if parameters is None else parameters
        self.notes = _NOTE + ("" if parameters is not None else _OWN_SPLITTER)

    def messages(self, sample: Sample, repeat: int) -> list[Message]:
        """Returns the prompt as it is."""
        return [user(sample.question)]

    def grade(self, sample: Sample, repeat: int, text: str) -> Outcome:
        """Checks each instruction of the prompt, strictly and loosely."""
        results = [
            {"instruction": one["id"]} | self._verdicts(one["id"], one["arguments"], text)
            for one in sample.target
        ]
        followed = all(result["strict"] for result in results)
        detail = {"instructions": results, "loose": all(result["loose"] for result in results)}
        return Outcome(float(followed), None, detail)

    def _verdicts(self, name: str, arguments: dict[str, Any], text: str) -> dict[str, Any]:
        try:
            exact = strict(name, arguments, text, self._parameters)
            return {"strict": exact, "loose": exact or loose(name, arguments, text, self._parameters)}
        except (KeyError, TypeError, re.error) as fault:
            return {"strict": False, "loose": False, "reason": f"the data has no usable argument ({fault!r})"}

    def breakdowns(self, scored: Sequence[Scored]) -> list[Breakdown]:
        """Returns the other three metrics of the harness, then the strict score of each instruction."""
        graded = [one.outcome.detail for one in scored if "instructions" in one.outcome.detail]
        results = [result for detail in graded for result in detail["instructions"]]
        if not results:
            return []
        columns = {
            "prompt_level_loose_acc": [detail["loose"] for detail in graded],
            "inst_level_strict_acc": [result["strict"] for result in results],
            "inst_level_loose_acc": [result["loose"] for result in results],
        }
        for name in sorted({result["instruction"] for result in results}):
            columns[name] = [result["strict"] for result in results if result["instruction"] == name]
        return [Breakdown(name, sum(column) / len(column), len(column)) for name, column in columns.items()]


def ifeval(*, data: Path | None = None, limit: int | None = None, seed: int = 0) -> Ifeval:
    """Makes the task. Raises ``ConfigError`` for instructions that are not IFEval's."""
    language.require()
    folder = data_folder(Ifeval.name, data)
    rows = load_rows(SOURCE, folder, columns=("key", "prompt", "instruction_id_list", "kwargs"))
    names = unique(str(row["key"]) for row in rows)
    samples = [
        Sample(id=name, question=row["prompt"], target=_instructions(row))
        for name, row in zip(names, rows, strict=True)
    ]
    parameters = find_parameters(folder)
    return Ifeval(samples, parameters, limit=limit, seed=seed, data_revision=digest(rows))


def _instructions(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns names with arguments, without the nulls that some files have for those of other kinds."""
    names, arguments = row["instruction_id_list"], row["kwargs"]
    unknown = [name for name in names if name not in CHECKS]
    if unknown or len(names) != len(arguments):
        raise ConfigError(f"ifeval: prompt {row['key']} has unknown instructions: {unknown or names}")
    return [
        {"id": name, "arguments": {key: value for key, value in given.items() if value}}
        for name, given in zip(names, arguments, strict=True)
    ]
