"""A model whose replies are given, and API classes in this process."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from chorale.evaluation.task import Message, Reply, ToolCall
from chorale.evaluation.tasks.bfcl import api_host
from chorale.evaluation.tasks.bfcl.api_process import ApiProcess
from chorale.evaluation.tasks.bfcl.entries import Entry
from chorale.evaluation.tasks.bfcl.source import BfclFiles

Calls = Sequence[tuple[str, str]]  # name, arguments as the server sends them


def reply(calls: Calls, number: int = 0) -> Reply:
    made = tuple(ToolCall(f"c{number}-{place}", name, text) for place, (name, text) in enumerate(calls))
    return Reply("" if made else "done", tool_calls=made)


class ScriptedSession:
    """Replies with the calls of ``script``, then with text; keeps what it was asked."""

    def __init__(self, script: Sequence[Calls]) -> None:
        self.sent: list[tuple[list[Message], Any]] = []
        self._left = iter(script)

    async def ask(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] | None = None, **_: Any
    ) -> Reply:
        self.sent.append((copy.deepcopy(list(messages)), tools))
        return reply(next(self._left, ()), len(self.sent))


class ApisHere(ApiProcess):
    """Answers as the child process does, through the same JSON."""

    def __init__(self, start: dict[str, Any]) -> None:
        self._host = api_host.Host(start)

    async def _ask(self, request: dict[str, Any], seconds: float | None = None) -> Any:
        return json.loads(json.dumps(self._host.answer(request)))


@contextmanager
def apis_here(files: BfclFiles) -> Iterator[Any]:
    """Yields a function that makes the APIs of an entry. For classes of our own only."""
    before = set(sys.modules)
    api_host._prepare_package(files.import_path)

    def made(entry: Entry) -> ApiProcess:
        modules = {name: files.module(name) for name in entry.classes}
        start = {"id": entry.id, "classes": modules, "initial": entry.initial}
        return ApisHere(start | {"long_context": entry.long_context})

    try:
        yield made
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("bfcl_eval"):
                del sys.modules[name]
