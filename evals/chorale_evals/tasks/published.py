"""Published tasks: questions from a data set, each asked in one message."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from chorale_evals.data import Source, data_folder, digest, load_rows, text_id, unique
from chorale_evals.task import Sample, Task
from chorale_evals.wire import Message


class PublishedTask(Task):
    """A task from a data set. ``sources``: its files. ``columns``: names of those that each row must have."""

    sources: Sequence[Source] = ()
    columns: Sequence[str] = ()

    @classmethod
    def load(cls, data: Path | None, limit: int | None, seed: int) -> Self:
        """Reads the rows from ``data`` (the value of ``--data``; None: the web). Raises ``ConfigError``."""
        folder = data_folder(cls.name, data)
        rows = [row for source in cls.sources for row in load_rows(source, folder, cls.columns)]
        names = unique(map(cls.row_id, rows))
        samples = [cls.sample(name, row) for name, row in zip(names, rows, strict=True)]
        return cls(samples, limit, seed, digest(rows))

    @classmethod
    def row_id(cls, row: dict[str, Any]) -> str:
        return text_id(row[cls.columns[0]])

    @classmethod
    def sample(cls, name: str, row: dict[str, Any]) -> Sample:
        """Returns the sample of a row. Raises ``ConfigError`` if the row is invalid."""
        raise NotImplementedError

    def prompt(self, sample: Sample, repeat: int) -> str:
        """Returns the text of the user message."""
        raise NotImplementedError

    def messages(self, sample: Sample, repeat: int) -> list[Message]:
        return [{"role": "user", "content": self.prompt(sample, repeat)}]
