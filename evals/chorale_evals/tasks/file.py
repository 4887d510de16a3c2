"""``file:PATH``: an operator's own questions, one JSON object per line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from chorale.errors import ConfigError
from chorale_evals.data import read_file, text_id
from chorale_evals.graders import Grader
from chorale_evals.graders.choice import Choice
from chorale_evals.graders.exact import Exact
from chorale_evals.graders.number import Number
from chorale_evals.graders.regex import Regex
from chorale_evals.graders.schema import JsonSchema
from chorale_evals.task import Outcome, Sample, Task
from chorale_evals.wire import Message, strictly

AnyGrader = Exact | Number | Choice | Regex | JsonSchema
_OURS = {"model", "messages", "stream", "n"}  # request fields that a line must not set


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Any] | None = None
    tool_calls: list[Any] = []

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls:
            raise ValueError("the message has no content")


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the file. ``grader``: a name, or an object with ``type`` and options."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)] | Annotated[list[_Message], msgspec.Meta(min_length=1)]
    answer: Any
    grader: str | dict[str, Any] = "exact"
    id: Annotated[str, msgspec.Meta(min_length=1)] | int | None = None
    group: str = ""
    request: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if found := sorted(self.request.keys() & _OURS):
            raise ValueError(f"'request' must not set {found[0]!r}")
        if not f"{self.group}{self.id}".isprintable():
            raise ValueError("'id' and 'group' must consist of printable characters")


class FileTask(Task):
    """A task from the lines of a file. A line without an id gets a hash of its prompt, answer and grader."""

    version = "1"

    @classmethod
    def load(cls, data: Path, limit: int | None, seed: int) -> FileTask:
        """Reads the file ``data``. Raises ``ConfigError`` for a bad file or line."""
        content = read_file(data)
        revision = f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"
        task = cls(list(_samples(content, data)), limit, seed, revision)
        task.name = f"file:{data.name}"
        return task

    def messages(self, sample: Sample, repeat: int) -> list[Message]:
        messages: list[Message] = sample.question["messages"]
        return messages

    def fields(self, sample: Sample) -> dict[str, Any]:
        return dict(sample.question.get("request", {}))

    def grade(self, sample: Sample, repeat: int, text: str) -> Outcome:
        grader: Grader = msgspec.convert(sample.question["grader"], AnyGrader)
        return grader.grade(text, sample.target)


def _samples(data: bytes, path: Path) -> Iterator[Sample]:
    seen: dict[str, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            sample = _sample(strictly(line.decode("utf-8-sig" if number == 1 else "utf-8")))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if sample.id in seen:
            raise ConfigError(f"{path}, line {number}: the same id as line {seen[sample.id]} ({sample.id})")
        seen[sample.id] = number
        yield sample
    if not seen:
        raise ConfigError(f"{path}: no lines")


def _sample(given: Any) -> Sample:
    """Returns the sample of a parsed line. Raises ``ValueError`` if the line is invalid."""
    line = msgspec.convert(given, _Line)
    options = {"type": line.grader} if isinstance(line.grader, str) else line.grader
    msgspec.convert(options, AnyGrader).check(line.answer)
    prompt = given["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    question: dict[str, Any] = {"messages": messages, "grader": options}
    if "request" in given:
        question["request"] = line.request
    text = json.dumps([question, line.answer], sort_keys=True, separators=(",", ":"))
    name = text_id(text) if line.id is None else str(line.id)
    return Sample(name, question, line.answer, line.group)
