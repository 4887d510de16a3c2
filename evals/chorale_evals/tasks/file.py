"""``file:PATH``: an operator's own questions, one JSON object per line."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chorale_evals.errors import DataError
from chorale_evals.graders.sandbox import run_program
from chorale_evals.graders.schema import strictly
from chorale_evals.graders.table import GRADERS
from chorale_evals.task import Message, Outcome, Reply, Sample, Session, Task

_FIELDS = {"id", "prompt", "answer", "grader", "group", "request"}
_OURS = {"model", "messages", "stream", "n"}  # fields of a request that a line cannot set
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_BYTES = 2**30


class FileTask(Task):
    """The lines of a file. Lines without an id get a hash of their prompt, answer and grader."""

    version = "1"

    def __init__(self, path: Path, limit: int | None, seed: int) -> None:
        data = _read(path)
        revision = f"sha256:{hashlib.sha256(data).hexdigest()[:16]}"
        super().__init__(list(_samples(data, path)), limit, seed, revision)
        self.name = f"file:{path.name}"

    async def prepare(self) -> None:
        if any(sample.question["grader"]["type"] == "unit_test" for sample in self.samples):
            await run_program("pass")

    async def run(self, sample: Sample, repeat: int, session: Session) -> Outcome:
        question = sample.question
        reply = await session.ask(question["messages"], **question.get("request", {}))
        options = dict(question["grader"])
        outcome = GRADERS[options.pop("type")].grade(_graded(reply), sample.target, **options)
        if inspect.isawaitable(outcome):
            outcome = await outcome
        assert isinstance(outcome, Outcome)
        return outcome


def _graded(reply: Reply) -> str:
    """Returns the text, or the calls as JSON: ``[{"name": ..., "arguments": {...}}]``."""
    if not reply.tool_calls:
        return reply.text
    calls = []
    for call in reply.tool_calls:
        try:
            arguments = strictly(call.arguments)
        except (ValueError, RecursionError):
            arguments = call.arguments
        calls.append({"name": call.name, "arguments": arguments})
    return json.dumps(calls, ensure_ascii=False)


def file_task(*, data: Path | None, limit: int | None, seed: int) -> FileTask:
    assert data is not None
    return FileTask(data, limit, seed)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path}: larger than {_MAX_BYTES // 2**20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _samples(data: bytes, path: Path) -> Iterator[Sample]:
    seen: dict[str, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            sample = _sample(strictly(line.decode("utf-8-sig" if number == 1 else "utf-8")))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: {error}") from None
        if sample.id in seen:
            raise DataError(f"{path}, line {number}: the same id as line {seen[sample.id]} ({sample.id})")
        seen[sample.id] = number
        yield sample
    if not seen:
        raise DataError(f"{path}: no lines")


def _sample(line: Any) -> Sample:
    """Raises ``ValueError``."""
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    if unknown := sorted(line.keys() - _FIELDS):
        raise ValueError(f"unknown field {unknown[0]!r} (there are {', '.join(sorted(_FIELDS))})")
    for name in ("prompt", "answer"):
        if name not in line:
            raise ValueError(f"{name!r} is missing")
    messages, grader = _messages(line["prompt"]), _grader(line.get("grader", "exact"))
    options = {name: value for name, value in grader.items() if name != "type"}
    GRADERS[grader["type"]].check(line["answer"], options)
    question: dict[str, Any] = {"messages": messages, "grader": grader}
    if "request" in line:
        question["request"] = _request(line["request"])
    group = line.get("group", "")
    if not isinstance(group, str):
        raise ValueError("'group' must be a string")
    if not (group + str(line.get("id", ""))).isprintable():
        raise ValueError("'id' and 'group' must consist of printable characters")
    return Sample(_id(line.get("id"), question, line["answer"]), question, line["answer"], group)


def _id(given: Any, question: dict[str, Any], answer: Any) -> str:
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, (str, int)) or given == "":
            raise ValueError("'id' must be a string or an integer")
        return str(given)
    text = json.dumps([question, answer], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _messages(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("'prompt' is empty")
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("'prompt' must be a string or a list of messages")
    for message in prompt:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(f"a message of 'prompt' has no role of {', '.join(_ROLES)}")
        if not isinstance(message.get("content"), (str, list)) and not message.get("tool_calls"):
            raise ValueError("a message of 'prompt' has no content")
    return prompt


def _request(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError("'request' must be an object")
    if found := sorted(given.keys() & _OURS):
        raise ValueError(f"'request' must not set {found[0]!r}")
    return given


def _grader(given: Any) -> dict[str, Any]:
    grader = {"type": given} if isinstance(given, str) else given
    if not isinstance(grader, dict) or not isinstance(grader.get("type"), str):
        raise ValueError("'grader' must be a name, or an object with 'type'")
    kind = grader["type"]
    if kind not in GRADERS:
        raise ValueError(f"unknown grader {kind!r} (there are {', '.join(GRADERS)})")
    known = GRADERS[kind].options
    for name, value in grader.items():
        if name == "type":
            continue
        if name not in known:
            raise ValueError(
                f"the grader {kind} has no option {name!r} (it has {', '.join(known) or 'none'})"
            )
        if not isinstance(value, known[name]) or (
            isinstance(value, bool) and known[name] not in ((bool,), (object,))
        ):
            raise ValueError(f"the option {name!r} of the grader {kind} has a wrong type")
    return grader
