"""The progress of a run on stderr: bars with the running score on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from chorale_evals.record import Record
from chorale_evals.summary import Tally, cost, total_usage

_LINE_SECONDS, _BAR_SECONDS = 15.0, 0.2


class Display:
    """Shows the tallies as they grow. A context manager."""

    def __init__(
        self, tallies: Mapping[tuple[str, str], Tally], prices: tuple[float | None, float | None]
    ) -> None:
        self._tallies, self._prices = tallies, prices
        self._bars: Progress | None = None
        self._rows: dict[tuple[str, str], TaskID] = {}
        self._began = self._shown = time.monotonic()
        self._num_new = 0
        self._out_before = total_usage(tallies.values()).output
        if sys.stderr.isatty():
            columns = (TextColumn("{task.fields[name]}"), BarColumn(bar_width=20), MofNCompleteColumn())
            left = TimeRemainingColumn(elapsed_when_finished=True)
            state = TextColumn("{task.fields[state]}")
            self._bars = Progress(*columns, state, left, console=Console(stderr=True), refresh_per_second=4)
        self._pause = _BAR_SECONDS if self._bars else _LINE_SECONDS  # between two updates

    def __enter__(self) -> Display:
        if self._bars is not None:
            for key, tally in self._tallies.items():
                name = f"{tally.task} {tally.effort}"
                self._rows[key] = self._bars.add_task(
                    "", total=tally.total, completed=tally.num_done, name=name, state=""
                )
            self._bars.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def add(self, record: Record) -> None:
        """Counts a new record and shows it."""
        key = (record.task, record.effort)
        tally, now = self._tallies[key], time.monotonic()
        tally.add(record)
        self._num_new += 1
        if now - self._shown < self._pause and tally.num_done < tally.total:
            return
        self._shown = now
        state = ", ".join([*_state(tally), *self._spent(now)])
        if self._bars is not None:
            self._bars.update(self._rows[key], completed=tally.num_done, state=state)
            return
        left = sum(each.total - each.num_done for each in self._tallies.values())
        rest = f", about {duration((now - self._began) / self._num_new * left)} left" if left else ""
        done = f"{tally.task} {tally.effort}: {tally.num_done}/{tally.total}"
        print(f"{done}, {state}{rest}", file=sys.stderr, flush=True)

    def _spent(self, now: float) -> list[str]:
        """Returns the speed, tokens and cost of the whole run."""
        usage = total_usage(self._tallies.values())
        speed = (usage.output - self._out_before) / max(now - self._began, 1e-3)
        price = cost(usage, *self._prices)
        parts = [f"{short(speed)} tok/s", f"{short(usage.output)} tokens"]
        return parts if price is None else [*parts, f"{price:.2f} spent"]


def _state(tally: Tally) -> list[str]:
    """Returns the running score and troubles."""
    parts = []
    if tally.mean is not None:
        interval = tally.interval
        parts.append(f"{100 * tally.mean:.1f} % ({100 * interval.low:.0f}-{100 * interval.high:.0f})")
    troubles = (("cut", tally.num_cut), ("refused", tally.num_refused), ("failed", tally.num_failed))
    return parts + [f"{count} {what}" for what, count in troubles if count]


def short(value: float) -> str:
    """Returns a count in at most four characters and a unit: 950, 12k, 3.4M."""
    for limit, divisor, unit in ((1e4, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < limit:
            return f"{value / divisor:.{1 if unit == 'M' and value < 1e7 else 0}f}{unit}"
    return f"{value / 1e9:.1f}G"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
