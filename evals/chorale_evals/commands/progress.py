"""The progress of a run on stderr: bars with the running score on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from chorale.requests.usage import TokenUsage
from chorale_evals.record import Record
from chorale_evals.summary import Tally, cost

_LINE_SECONDS, _BAR_SECONDS = 15.0, 0.2


class Display:
    """Shows the tallies as they grow. A context manager."""

    def __init__(
        self, tallies: Mapping[tuple[str, str], Tally], prices: tuple[float | None, float | None]
    ) -> None:
        self._tallies, self._prices = tallies, prices
        self._rows: dict[tuple[str, str], TaskID] = {}
        self._bars: Progress | None = None
        self._all = TaskID(0)  # the row of the whole run
        self._began = self._shown = time.monotonic()
        self._num_new = 0
        self._out_before = sum(tally.usage.output for tally in tallies.values())
        self._pause = _BAR_SECONDS if sys.stderr.isatty() else _LINE_SECONDS  # between two updates
        if sys.stderr.isatty():
            self._bars = Progress(
                TextColumn("{task.fields[name]}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=Console(stderr=True),
                refresh_per_second=4,
                speed_estimate_period=120,
            )

    def __enter__(self) -> Display:
        if self._bars is not None:
            total, done = (
                sum(getattr(tally, name) for tally in self._tallies.values())
                for name in ("total", "num_done")
            )
            self._all = self._bars.add_task("", total=total, completed=done, name="all", state="")
            self._bars.start()
        for key, tally in self._tallies.items():
            if tally.num_done:
                self._show(key)
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def add(self, record: Record) -> None:
        """Counts a new record and shows it."""
        key = (record.task, record.effort)
        self._tallies[key].add(record)
        self._num_new += 1
        tally, now = self._tallies[key], time.monotonic()
        if now - self._shown < self._pause and tally.num_done < tally.total:
            return
        self._shown = now
        if self._bars is not None:
            self._show(key)
        else:
            print(self._line(tally), file=sys.stderr, flush=True)

    def _show(self, key: tuple[str, str]) -> None:
        if self._bars is None:
            return
        tally = self._tallies[key]
        if key not in self._rows:
            name = f"{tally.task} {tally.effort}"
            self._rows[key] = self._bars.add_task(
                "", total=tally.total, completed=tally.num_done, name=name, state=""
            )
        self._bars.update(self._rows[key], completed=tally.num_done, state=self._state(tally))
        done = sum(each.num_done for each in self._tallies.values())
        self._bars.update(self._all, completed=done, state=self._spent())

    def _state(self, tally: Tally) -> str:
        """Returns the running score and troubles."""
        parts = []
        if tally.mean is not None:
            interval = tally.interval
            parts.append(f"{100 * tally.mean:.1f} % ({100 * interval.low:.0f}-{100 * interval.high:.0f})")
        troubles = (("cut", tally.num_cut), ("refused", tally.num_refused), ("failed", tally.num_failed))
        parts += [f"{count} {what}" for what, count in troubles if count]
        return ", ".join(parts)

    def _spent(self) -> str:
        """Returns the speed, tokens and cost of the whole run."""
        usage = sum((each.usage for each in self._tallies.values()), start=TokenUsage())
        parts = [f"{short(self._speed())} tok/s", f"{short(usage.output)} tokens"]
        if (price := cost(usage, *self._prices)) is not None:
            parts.append(f"{price:.2f} spent")
        return ", ".join(parts)

    def _speed(self) -> float:
        made = sum(tally.usage.output for tally in self._tallies.values()) - self._out_before
        return made / max(time.monotonic() - self._began, 1e-3)

    def _line(self, tally: Tally) -> str:
        left = sum(each.total - each.num_done for each in self._tallies.values())
        seconds = (time.monotonic() - self._began) / max(self._num_new, 1) * left
        rest = f", about {duration(seconds)} left" if left else ""
        done = f"{tally.task} {tally.effort}: {tally.num_done}/{tally.total}"
        return f"{done}, {self._state(tally)}, {self._spent()}{rest}"


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
