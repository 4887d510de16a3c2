"""The progress bar of ``LLM``: finished prompts, input and output tokens per second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from chorale.engine.types import EngineStats

UseTqdm = bool | Callable[..., Any]  # a callable gets tqdm's arguments and returns a bar
_INTERVAL = 0.1  # seconds between two updates


class Progress:
    """Shows progress on a bar with tqdm's methods. ``show`` is cheap enough to be called after every step."""

    def __init__(self, bar: Any, stats: Callable[[], EngineStats]) -> None:
        """``bar``: None shows nothing."""
        self._bar, self._stats = bar, stats
        self._shown = 0
        self._began = time.perf_counter()
        self._due = self._began
        before = stats()
        self._before = before.prompt_tokens, before.generation_tokens

    def show(self, num_done: int) -> None:
        """Update the bar if the last update was at least ``_INTERVAL`` ago."""
        now = time.perf_counter()
        if self._bar is not None and now >= self._due:
            self._due = now + _INTERVAL
            self._update(num_done, now)

    def close(self, num_done: int) -> None:
        """Show the final state."""
        if self._bar is not None:
            self._update(num_done, time.perf_counter())
            self._bar.close()

    def _update(self, num_done: int, now: float) -> None:
        seconds, stats = max(now - self._began, 1e-6), self._stats()
        read, made = stats.prompt_tokens - self._before[0], stats.generation_tokens - self._before[1]
        self._bar.postfix = _postfix(read / seconds, made / seconds)
        if num_done > self._shown:
            self._bar.update(num_done - self._shown)
            self._shown = num_done
        elif isinstance(self._bar, tqdm):
            self._bar.refresh()  # other bars need only ``update`` and ``close``


def make_progress(total: int, use: UseTqdm, stats: Callable[[], EngineStats]) -> Progress:
    """Return the progress for the argument ``use_tqdm``. ``True`` shows a bar only on a terminal."""
    make = use if callable(use) else tqdm if use and sys.stderr.isatty() else None
    if make is None or not total:
        return Progress(None, stats)
    bar = make(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_postfix(0, 0))
    return Progress(bar, stats)


def _postfix(read: float, made: float) -> str:
    return f"est. speed input: {read:.2f} toks/s, output: {made:.2f} toks/s"
