"""Progress on stderr: one rewritten line on a terminal, else a new line every 15 seconds."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from chorale_evals.record import Record
from chorale_evals.summary import Tally

_LINE_SECONDS, _REWRITE_SECONDS = 15.0, 0.2


class Line:
    """A line of progress. ``quiet``: nothing is shown."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._is_terminal, self._quiet = sys.stderr.isatty(), quiet
        self._pause = _REWRITE_SECONDS if self._is_terminal else _LINE_SECONDS
        self._began = self._shown = time.monotonic()

    @property
    def seconds(self) -> float:
        """Returns the time since the start."""
        return max(time.monotonic() - self._began, 1e-3)

    def left(self, done: float, total: float) -> str:
        """Returns the estimated remaining time (h:mm:ss), from the average speed so far."""
        return f"about {timedelta(seconds=int(self.seconds * (total - done) / done))} left" if done else ""

    def show(self, text: Callable[[], str], *, last: bool = False) -> None:
        """Shows a line if the last one is old enough. ``last``: always, and ends the line."""
        now = time.monotonic()
        if self._quiet or (now - self._shown < self._pause and not last):
            return
        self._shown = now
        end = "\r" if self._is_terminal and not last else "\n"
        width = shutil.get_terminal_size().columns - 1 if self._is_terminal else None
        print(text()[:width].ljust(width or 0), end=end, file=sys.stderr, flush=True)


class Display:
    """Shows the tallies of a run as they grow."""

    def __init__(self, tallies: Mapping[tuple[str, str], Tally]) -> None:
        self._tallies, self._line = tallies, Line()
        self._num_new = 0
        self._tokens_before = self._tokens

    def add(self, record: Record) -> None:
        """Counts a new record and shows it."""
        tally = self._tallies[record.task, record.effort]
        tally.add(record)
        self._num_new += 1
        self._line.show(lambda: self._state(tally), last=tally.num_done == tally.total)

    @property
    def _tokens(self) -> int:
        return sum(tally.usage.output for tally in self._tallies.values())

    def _state(self, tally: Tally) -> str:
        """Returns the running score and problems of a tally, and the speed and tokens of the run."""
        parts = [f"{tally.task.name} {tally.effort}: {tally.num_done}/{tally.total}"]
        if tally.mean is not None:
            interval = tally.interval
            parts.append(f"{100 * tally.mean:.1f} % ({100 * interval.low:.0f}-{100 * interval.high:.0f})")
        troubles = (("cut", tally.num_cut), ("refused", tally.num_refused), ("failed", tally.num_failed))
        parts += [f"{count} {what}" for what, count in troubles if count]
        parts.append(f"{short((self._tokens - self._tokens_before) / self._line.seconds)} tok/s")
        parts.append(f"{short(self._tokens)} tokens")
        rest = sum(each.total - each.num_done for each in self._tallies.values())
        parts += [self._line.left(self._num_new, self._num_new + rest)] if rest else []
        return ", ".join(parts)


def short(value: float) -> str:
    """Returns a count in at most four characters and a unit: 950, 12k, 3.4M."""
    for limit, divisor, unit in ((1e4, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < limit:
            return f"{value / divisor:.{1 if unit == 'M' and value < 1e7 else 0}f}{unit}"
    return f"{value / 1e9:.1f}G"
