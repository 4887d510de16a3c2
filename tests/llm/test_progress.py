"""The progress bar on a terminal and with a caller's bar; no output elsewhere."""

from __future__ import annotations

import io
from typing import Any, TextIO

import pytest

from chorale.engine.types import EngineStats
from chorale.llm import progress
from chorale.llm.progress import make_progress


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


def test_a_bar_on_a_terminal_shows_speeds(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen, stats = Terminal(), Counters()
    monkeypatch.setattr(progress.sys, "stderr", screen)
    shown = make_progress(8, True, stats)
    shown.show(0)
    clock[0] += 2
    stats.now = EngineStats(prompt_tokens=2500, generation_tokens=4900)
    shown.show(0)  # no prompt is finished, but tokens are made
    assert "0/8" in screen.getvalue()
    assert "input: 1000.00 toks/s, output: 2000.00 toks/s" in screen.getvalue()
    clock[0] += 2
    shown.close(8)
    last = screen.getvalue().rsplit("\r", 1)[1]
    assert last.startswith("Processed prompts: 100%")
    assert " 8/8 [" in last
    assert "input: 500.00 toks/s, output: 1000.00 toks/s" in last


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
