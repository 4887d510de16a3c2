"""The tasks of ``chorale eval``, by name."""

from __future__ import annotations

from pathlib import Path

from chorale.errors import ConfigError
from chorale_evals.data import SAMPLES
from chorale_evals.task import Task
from chorale_evals.tasks.aime25 import Aime25
from chorale_evals.tasks.file import FileTask
from chorale_evals.tasks.gpqa import Gpqa
from chorale_evals.tasks.mmlu import Mmlu
from chorale_evals.tasks.published import PublishedTask

TASKS: dict[str, type[PublishedTask]] = {task.name: task for task in (Gpqa, Aime25, Mmlu)}
# Tasks that other tools define and run, unmodified, against a server (docs/reference/evaluation.md).
ELSEWHERE = {
    **dict.fromkeys(("gsm8k", "mmlu_pro", "ifeval"), "lm-eval"),
    "humaneval": "inspect-evals",
    **dict.fromkeys(("bfcl", "bfcl_non_live", "bfcl_live", "bfcl_multi_turn"), "bfcl-eval"),
}
FILE_PREFIX = "file:"


def make_task(name: str, *, data: Path | None = None, limit: int | None = None, seed: int = 0) -> Task:
    """Returns the task of that name, or of ``file:PATH``. Raises ``ConfigError`` for an unknown name."""
    if name.startswith(FILE_PREFIX):
        return FileTask.load(Path(name.removeprefix(FILE_PREFIX)), limit, seed)
    if name == "sample":
        return FileTask.load(SAMPLES / "sample.jsonl", limit, seed)
    if name in TASKS:
        return TASKS[name].load(data, limit, seed)
    if name in ELSEWHERE:
        raise ConfigError(
            f"{name} is a task of {ELSEWHERE[name]}, which runs it against a server: "
            'docs/reference/evaluation.md, "Tasks of other tools", has the command'
        )
    raise ConfigError(f"unknown task {name!r}; the tasks are {', '.join(TASKS)}, sample and file:PATH")
