"""The progress bar of ``LLM`` on a terminal: finished requests, input and output tokens per second."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from chorale.engine.types import EngineStats

UseTqdm = bool | Callable[..., Any]  # a callable gets tqdm's arguments and returns a bar
_INTERVAL = 0.1  # seconds between two updates
_WIDTH = 24  # maximum width of the bar, in columns


class Progress:
    """The base class of bars; shows nothing. ``show`` is cheap enough to be called after every step."""

    def __init__(self, total: int, stats: Callable[[], EngineStats]) -> None:
        self._total, self._stats = total, stats
        self._began = time.perf_counter()
        self._due = self._began
        before = stats()
        self._before = before.prompt_tokens, before.generation_tokens

    def show(self, num_done: int) -> None:
        """Update the display if the last update was at least ``_INTERVAL`` ago."""
        now = time.perf_counter()
        if now >= self._due:
            self._due = now + _INTERVAL
            self.update(num_done, max(now - self._began, 1e-6))

    def update(self, num_done: int, seconds: float) -> None:
        """Show the progress after ``seconds``."""

    def close(self, num_done: int) -> None:
        """Show the final state."""

    def speeds(self, seconds: float) -> tuple[float, float]:
        """Return input and output tokens per second since the start."""
        stats = self._stats()
        read, made = stats.prompt_tokens - self._before[0], stats.generation_tokens - self._before[1]
        return read / seconds, made / seconds


class Bar(Progress):
    """A bar on one line of a terminal; each update overwrites it."""

    def __init__(self, total: int, stats: Callable[[], EngineStats], stream: TextIO) -> None:
        super().__init__(total, stats)
        self._stream = stream

    def update(self, num_done: int, seconds: float) -> None:
        columns = os.get_terminal_size(self._stream.fileno()).columns or 80
        self._stream.write("\r" + self._line(num_done, seconds, columns - 1) + "\x1b[K")
        self._stream.flush()

    def close(self, num_done: int) -> None:
        self.update(num_done, max(time.perf_counter() - self._began, 1e-6))
        self._stream.write("\n")
        self._stream.flush()

    def _line(self, num_done: int, seconds: float, columns: int) -> str:
        """Return the line. The bar fills the space between the texts."""
        share = num_done / self._total
        left = f"<{_clock(seconds / share - seconds)}" if num_done else ""
        read, made = self.speeds(seconds)
        head = f"Prompts {share:4.0%} "
        tail = (
            f"{num_done}/{self._total} [{_clock(seconds)}{left}, {num_done / seconds:.1f} req/s, "
            f"input {read:.0f}, output {made:.0f} tok/s]"
        )
        width = max(0, min(_WIDTH, columns - len(head) - len(tail) - 1))
        cells = round(share * width)
        return f"{head}{'━' * cells}{'─' * (width - cells)} {tail}"[:columns]


class GivenBar(Progress):
    """A bar with tqdm's methods, made by the caller's function. tqdm limits the refresh rate itself."""

    def __init__(self, total: int, stats: Callable[[], EngineStats], make: Callable[..., Any]) -> None:
        super().__init__(total, stats)
        self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_postfix(0, 0))
        self._shown = 0

    def update(self, num_done: int, seconds: float) -> None:
        if num_done > self._shown:
            self._bar.postfix = _postfix(*self.speeds(seconds))
            self._bar.update(num_done - self._shown)
            self._shown = num_done

    def close(self, num_done: int) -> None:
        self.update(num_done, max(time.perf_counter() - self._began, 1e-6))
        self._bar.close()


def make_progress(total: int, use: UseTqdm, stats: Callable[[], EngineStats]) -> Progress:
    """Return the bar for the argument ``use_tqdm``. ``True`` shows one only on a terminal."""
    if total and callable(use):
        return GivenBar(total, stats, use)
    if total and use and sys.stderr.isatty():
        return Bar(total, stats, sys.stderr)
    return Progress(total, stats)


def _postfix(read: float, made: float) -> str:
    return f"est. speed input: {read:.2f} toks/s, output: {made:.2f} toks/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
