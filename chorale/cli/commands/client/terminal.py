"""Prints an answer as it arrives, with dimmed reasoning, rendered Markdown and named tool calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console

from chorale.cli.commands.client.markdown import MarkdownWriter

DIM, BOLD, RESET = "\033[2m", "\033[1m", "\033[0m"


@dataclass(slots=True)
class Answer:
    """The accumulated result of a stream."""

    content: str = ""
    reasoning: str = ""
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    seconds_to_first: float = 0.0
    seconds: float = 0.0

    @property
    def stats(self) -> str:
        tokens = int(self.usage.get("completion_tokens", 0))
        rate = tokens / max(self.seconds - self.seconds_to_first, 1e-9)
        return f"{tokens} tokens, {rate:.1f} tok/s, first after {self.seconds_to_first * 1000:.0f} ms"


class Printer:
    """Writes deltas to the terminal, with styles. ``plain``: shows Markdown as it is written.

    If standard output is a pipe or a file, it receives the plain answer, and standard error the reasoning.
    """

    def __init__(self, plain: bool = False) -> None:
        self._styled = sys.stdout.isatty()
        console = Console()
        self._console = console if self._styled and not plain and not console.is_dumb_terminal else None
        self._markdown: MarkdownWriter | None = None
        self._mode = ""

    @property
    def _output(self) -> TextIO:
        return sys.stderr if self._mode == "reasoning" and not self._styled else sys.stdout

    def write(self, mode: str, text: str) -> None:
        if mode != self._mode:
            self._switch(mode)
        if self._markdown is not None:
            self._markdown.write(printable(text))
            return
        self._output.write(printable(text))
        self._output.flush()

    def _switch(self, mode: str) -> None:
        if self._markdown is not None:
            self._markdown.close()
            self._markdown = None
        elif self._mode:
            self._output.write((RESET if self._styled else "") + "\n")
        if self._mode == "reasoning" and mode and self._styled:
            self._output.write("\n")
        self._output.flush()
        self._mode = mode
        if self._console is not None and mode == "content":
            self._markdown = MarkdownWriter(self._console)
        elif self._styled and mode == "reasoning":
            sys.stdout.write(DIM)
        elif self._styled and mode == "tool":
            sys.stdout.write(BOLD)

    def end(self) -> None:
        self._switch("")


def printable(text: str) -> str:
    """Escapes terminal control sequences, since model output is untrusted."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def show(events: Iterable[dict[str, Any]], printer: Printer) -> Answer:
    """Prints the chunks of a completion or a chat as they arrive. An interrupt ends only this answer."""
    answer, started = Answer(), time.perf_counter()
    try:
        for event in events:
            answer.usage = event.get("usage") or answer.usage
            for choice in event.get("choices", []):
                _show_delta(choice.get("delta") or {"content": choice.get("text")}, answer, printer, started)
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    except KeyboardInterrupt:
        answer.finish_reason = "interrupted"
    finally:
        printer.end()  # also after an error, so that later output does not inherit the style
    answer.seconds = time.perf_counter() - started
    return answer


def _show_delta(delta: dict[str, Any], answer: Answer, printer: Printer, started: float) -> None:
    reasoning = delta.get("reasoning") or delta.get("reasoning_content")
    if answer.seconds_to_first == 0.0 and (reasoning or delta.get("content") or delta.get("tool_calls")):
        answer.seconds_to_first = time.perf_counter() - started
    if reasoning:
        answer.reasoning += reasoning
        printer.write("reasoning", reasoning)
    if delta.get("content"):
        answer.content += delta["content"]
        printer.write("content", delta["content"])
    for call in delta.get("tool_calls") or []:
        _show_call(call, answer, printer)


def _show_call(call: dict[str, Any], answer: Answer, printer: Printer) -> None:
    function = call.get("function") or {}
    whole = answer.tool_calls.setdefault(call["index"], {"id": call.get("id"), "name": "", "arguments": ""})
    if function.get("name"):
        whole["name"] += function["name"]
        printer.write("tool", f"[call {function['name']}] ")
    if function.get("arguments"):
        whole["arguments"] += function["arguments"]
        printer.write("tool", function["arguments"])
