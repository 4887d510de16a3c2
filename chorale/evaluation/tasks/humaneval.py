"""HumanEval as lm-evaluation-harness' ``humaneval_instruct``: the model completes functions, tests decide.

The prompt is the harness's (lm_eval 0.4.13, MIT). The harness begins the model's answer with a code block,
which repeats the function; a chat server has no such field, so the model begins it, and the block is looked
for. An answer that only continues the function is read as the harness reads it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chorale.evaluation.data import HubFile, Row, WebFile, data_folder, digest, load_rows
from chorale.evaluation.graders.text import fences, tail
from chorale.evaluation.sandbox import run_program
from chorale.evaluation.task import BaseTask, Breakdown, Outcome, Sample, Scored, Session, take
from chorale.evaluation.tasks.question import GREEDY, user

# The first needs pyarrow; the second has the same rows in the same order.
SOURCES = (
    HubFile(
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
        "test",
        "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
    ),
    WebFile(
        "https://raw.githubusercontent.com/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d"
        "/data/HumanEval.jsonl.gz",
        "test",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    ),
)
_COLUMNS = ("task_id", "prompt", "test", "entry_point")
_TEMPLATE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{prompt}\n```\n"
)
_FENCE = "```"
SECONDS = 10.0  # of a program; the harness allows 3
_SHOWN = 2000  # characters of a program's output in the report


class HumanEval(BaseTask):
    """The score is pass@1; with repeats, pass@k for larger k is a breakdown."""

    name = "humaneval"
    version = "lm_eval 0.4.13 humaneval_instruct"
    metric = "pass@1"
    notes = (
        "The answer is not begun for the model: its code block is looked for, and runs after the prompt. "
        f"A program has {SECONDS:g} s instead of 3."
    )
    defaults = GREEDY

    def __init__(self, rows: Sequence[Row], *, limit: int | None, seed: int) -> None:
        self._rows = {str(row["task_id"]): row for row in rows}
        self._samples = take([_sample(row) for row in self._rows.values()], limit, seed)
        self.data_revision = digest(rows)

    def samples(self) -> Sequence[Sample]:
        """Returns the samples in a fixed order."""
        return self._samples

    async def prepare(self) -> None:
        """Starts the sandbox."""
        await run_program("pass", SECONDS)

    async def run(self, sample: Sample, repeat: int, session: Session) -> Outcome:
        """Asks for the function and runs it with its tests in the sandbox."""
        row = self._rows[sample.id]
        reply = await session.ask([user(_TEMPLATE.format(prompt=row["prompt"]))])
        program = solution(row["prompt"], row["entry_point"], tail(reply.text))
        if program is None:
            cut = reply.finish_reason == "length"
            return Outcome(
                0.0, None, {"reason": "the answer was cut at the token limit" if cut else "no code"}
            )
        ran = await run_program(f"{program}\n{row['test']}\ncheck({row['entry_point']})", SECONDS)
        detail: dict[str, Any] = {"reason": ran.reason}
        if ran.output:
            detail["output"] = ran.output[-_SHOWN:]
        return Outcome(float(ran.passed), program[len(row["prompt"]) :].strip("\n"), detail)

    def breakdowns(self, scored: Sequence[Scored]) -> list[Breakdown]:
        """Returns pass@k for powers of two up to the number of repeats."""
        passed: dict[str, list[float]] = {}
        for one in scored:
            passed.setdefault(one.sample.id, []).append(one.outcome.score)
        fewest = min((len(scores) for scores in passed.values()), default=0)
        ks = [2**power for power in range(1, fewest.bit_length()) if 2**power <= fewest]
        return [_pass_at(k, list(passed.values())) for k in ks]


def _sample(row: Row) -> Sample:
    return Sample(str(row["task_id"]), row["prompt"], row["test"])


def _pass_at(k: int, samples: Sequence[Sequence[float]]) -> Breakdown:
    values = [pass_at_k(len(scores), sum(score == 1.0 for score in scores), k) for scores in samples]
    return Breakdown(f"pass@{k}", sum(values) / len(values), len(values))


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Returns the unbiased estimate of the probability that one of ``k`` answers is right."""
    return 1.0 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def solution(prompt: str, entry_point: str, text: str) -> str | None:
    """Returns the program in an answer: the prompt with its function completed or defined anew.

    Returns None if the answer has no code.
    """
    head = text.partition(_FENCE)[0]
    if _continues(prompt, head):
        return prompt + head
    blocks = [code for _, code in fences(text if text.count(_FENCE) != 1 else f"{text}\n{_FENCE}")]
    defining = [code for code in blocks if _defines(code, entry_point)]
    if defining:
        return f"{prompt}\n    pass\n\n{defining[-1]}\n"
    continuing = [code for code in blocks if _continues(prompt, code)]
    if continuing:
        return prompt + continuing[-1]
    if not blocks and _defines(text, entry_point):
        return f"{prompt}\n    pass\n\n{text}\n"
    return f"{prompt}\n    pass\n\n{blocks[-1]}\n" if blocks else None


def _continues(prompt: str, text: str) -> bool:
    """Returns whether the text is the body of the prompt's last function."""
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and lines[0][0] in " \t" and _parsed(prompt + text) is not None


def _defines(text: str, name: str) -> bool:
    tree = _parsed(text)
    if tree is None:  # it has a mistake, which its run will show
        return f"def {name}(" in text
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    return any(isinstance(node, functions) and node.name == name for node in tree.body) or any(
        isinstance(target, ast.Name) and target.id == name for node in assigned for target in node.targets
    )


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def humaneval(*, data: Path | None = None, limit: int | None = None, seed: int = 0) -> HumanEval:
    """Returns the task."""
    rows = load_rows(SOURCES, data_folder("humaneval", data), columns=_COLUMNS)
    return HumanEval(rows, limit=limit, seed=seed)
