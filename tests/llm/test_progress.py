"""The progress bar on a pseudo-terminal and with a caller's bar; no output elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from typing import Any, TextIO

import pytest

from chorale.engine.types import EngineStats
from chorale.llm import progress
from chorale.llm.progress import Bar, make_progress


class Counters:
    def __init__(self) -> None:
        self.now = EngineStats(prompt_tokens=500, generation_tokens=900)

    def __call__(self) -> EngineStats:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("columns", [0, 20, 80, 140])
def test_the_line_on_a_terminal_shows_speeds_and_fits(clock: list[float], columns: int) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    stats = Counters()
    with open(theirs, "w", encoding="utf-8") as stream:
        bar = Bar(8, stats, stream)
        bar.show(0)
        clock[0] += 2
        stats.now = EngineStats(prompt_tokens=2500, generation_tokens=4900)
        bar.show(4)
        bar.show(5)  # too early for another update
        clock[0] += 2
        bar.close(8)
        written = b""
        while not written.endswith(b"\r\n"):  # a read may return less than the whole output
            written += os.read(ours, 4096)
    shown = written.decode()
    os.close(ours)
    assert shown.endswith("\r\n")
    lines = [line.removesuffix("\x1b[K") for line in shown.removesuffix("\r\n").split("\r")[1:]]
    assert len(lines) == 3
    assert all(len(line) < (columns or 80) for line in lines)
    if columns != 20:
        assert lines[1].endswith(" 4/8 [00:02<00:02, 2.0 req/s, input 1000, output 2000 tok/s]")
        assert lines[2].startswith("Prompts 100% ━━━")
        assert lines[2].endswith(" 8/8 [00:04<00:00, 2.0 req/s, input 500, output 1000 tok/s]")


class TheirBar:
    """A fake with the parts of tqdm that are used."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.postfix = given["postfix"]
        self.calls: list[Any] = []

    def update(self, count: int) -> None:
        self.calls.append((count, self.postfix))

    def close(self) -> None:
        self.calls.append("close")


def test_a_callable_gets_the_arguments_of_tqdm(clock: list[float]) -> None:
    stats, made = Counters(), list[TheirBar]()

    def make(**given: Any) -> TheirBar:
        made.append(TheirBar(**given))
        return made[-1]

    shown = make_progress(3, make, stats)
    shown.show(0)
    clock[0] += 1
    stats.now = EngineStats(prompt_tokens=600, generation_tokens=1000)
    shown.show(2)
    shown.close(3)
    (bar,) = made
    assert {name: bar.given[name] for name in ("total", "desc", "dynamic_ncols")} == {
        "total": 3,
        "desc": "Processed prompts",
        "dynamic_ncols": True,
    }
    assert bar.calls == [
        (2, "est. speed input: 100.00 toks/s, output: 100.00 toks/s"),
        (1, "est. speed input: 100.00 toks/s, output: 100.00 toks/s"),
        "close",
    ]


@pytest.mark.parametrize(("use", "tty", "total"), [(False, True, 3), (True, False, 3), (True, True, 0)])
def test_no_bar_is_shown_without_a_terminal_or_prompts_or_if_disabled(
    monkeypatch: pytest.MonkeyPatch, use: bool, tty: bool, total: int
) -> None:
    class Screen:
        def isatty(self) -> bool:
            return tty

        def write(self, text: str) -> None:
            raise AssertionError(f"written: {text!r}")

    screen: TextIO = Screen()  # type: ignore[assignment]
    monkeypatch.setattr(progress.sys, "stderr", screen)
    shown = make_progress(total, use, Counters())
    shown.show(0)
    shown.close(total)
