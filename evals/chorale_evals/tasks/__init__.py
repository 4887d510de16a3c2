"""The tasks of ``chorale eval``, by name."""

from __future__ import annotations

import importlib
from pathlib import Path

from chorale.errors import ConfigError
from chorale_evals.task import Task

# name -> "module:class"
TASKS = {"gpqa_diamond": "gpqa:Gpqa", "aime25": "aime25:Aime25", "mmlu": "mmlu:Mmlu"}
# Tasks that other tools define and run, unmodified, against a server (docs/reference/evaluation.md).
ELSEWHERE = {
    **dict.fromkeys(("gsm8k", "mmlu_pro", "ifeval"), "lm-eval"),
    "humaneval": "inspect-evals",
    **dict.fromkeys(("bfcl", "bfcl_non_live", "bfcl_live", "bfcl_multi_turn"), "bfcl-eval"),
}
FILE_PREFIX = "file:"
SAMPLE = Path(__file__).parents[1] / "samples" / "sample.jsonl"


def make_task(name: str, *, data: Path | None = None, limit: int | None = None, seed: int = 0) -> Task:
    """Returns the task of that name, or of ``file:PATH``. Raises ``ConfigError`` for an unknown name."""
    if name.startswith(FILE_PREFIX):
        path, data = "file:FileTask", Path(name.removeprefix(FILE_PREFIX))
    elif name == "sample":
        path, data = "file:FileTask", SAMPLE
    elif name in TASKS:
        path = TASKS[name]
    elif name in ELSEWHERE:
        raise ConfigError(
            f"{name} is a task of {ELSEWHERE[name]}, which runs it against a server: "
            'docs/reference/evaluation.md, "Tasks of other tools", has the command'
        )
    else:
        raise ConfigError(f"unknown task {name!r}; the tasks are {', '.join(TASKS)}, sample and file:PATH")
    module, _, kind = path.partition(":")
    found = getattr(importlib.import_module(f"chorale_evals.tasks.{module}"), kind)
    task: Task = found.load(data, limit, seed)
    return task
