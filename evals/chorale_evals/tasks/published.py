"""Published tasks: questions from a data set, each asked in one message."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from chorale_evals.data import Source, data_folder, digest, load_rows, text_id, unique
from chorale_evals.task import Sample, Task
from chorale_evals.wire import Message


class PublishedTask(Task):
    """``sources``: the files of the data set. ``columns``: those that each row must have."""

    sources: Sequence[Source] = ()
    columns: Sequence[str] = ()

    @classmethod
    def load(cls, data: Path | None, limit: int | None, seed: int) -> Self:
        """``data``: the folder of ``--data``, None for the web. Raises ``ConfigError``."""
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
        """Raises ``ConfigError`` for a row that is no question."""
        raise NotImplementedError

    def prompt(self, sample: Sample, repeat: int) -> str:
        """Returns the message of the user."""
        raise NotImplementedError

    def messages(self, sample: Sample, repeat: int) -> list[Message]:
        return [{"role": "user", "content": self.prompt(sample, repeat)}]
