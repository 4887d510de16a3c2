"""The terminal output of ``chorale run-batch``: a bar, or lines without a terminal, and a summary."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from chorale.cli.commands.serve.banner import Screen
from chorale.client.base import EngineInfo
from chorale.store.batch_rows import Result, StoredBatch

LINE_SECONDS = 10.0  # interval of the progress lines without a terminal
_BAR_SECONDS = 0.1  # interval of the bar's updates


class EngineScreen(Screen):
    """Prints the start of the engine, without the lines about a listening server."""

    def _banner(self, info: EngineInfo, seconds: float) -> Iterable[str]:
        yield f"{info.model} on {info.device} ({info.dtype}, {info.ops} ops): ready in {seconds:.1f} s"
        if info.notes:
            yield f"warning: {'; '.join(info.notes)}"

    def on_stopping(self) -> None:
        """Prints nothing, since the engine also stops after the last line of the batch."""
        self._end_live()


class LineProgress:
    """Progress of a run. ``begun``: the state of the batch before the run."""

    def __init__(self, begun: StoredBatch, *, quiet: bool = False) -> None:
        self._begun, self._quiet = begun, quiet
        self._num_lines = self._num_failed = self._num_tokens = 0  # counts of this run
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._began = self._due = time.monotonic()
        self._bar: Progress | None = None
        self._notes: list[str] = []

    def start(self) -> None:
        """Shows the bar and starts the clock. Called when the engine is ready."""
        self._began = time.monotonic()
        self._due = self._began + LINE_SECONDS
        if self._console.is_terminal and not self._quiet:
            self._bar = Progress(
                TextColumn("lines"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                Remaining(),
                TextColumn("{task.fields[rates]}"),
                console=self._console,
            )
            self._bar.add_task("", total=self._begun.num_lines, completed=self._begun.num_done, rates="")
            self._bar.start()
            self._due = 0.0

    def add(self, results: Sequence[Result]) -> None:
        """Adds finished lines to the counts."""
        self._num_lines += len(results)
        self._num_failed += sum(not result.completed for result in results)
        self._num_tokens += sum(result.tokens.output for result in results)
        self._update()

    def _update(self) -> None:
        moment = time.monotonic()
        if self._quiet or moment < self._due:
            return
        done = self._begun.num_done + self._num_lines
        if self._bar is None:
            self._due = moment + LINE_SECONDS
            self._console.print(f"{done} of {self._begun.num_lines} lines: {self._rates()}")
        else:
            self._due = moment + _BAR_SECONDS
            self._bar.update(self._bar.task_ids[0], completed=done, rates=self._rates())

    def note(self, line: str) -> None:
        """Prints a line above the bar, unless it was printed before."""
        if line not in self._notes:
            self._notes.append(line)
            self._console.print(line)

    def _rates(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-6)
        failed = self._begun.num_failed + self._num_failed
        shown = f"{self._num_lines / seconds:.1f} lines/s, {self._num_tokens / seconds:.0f} tok/s"
        return f"{shown}, {failed} failed" if failed else shown

    def close(self) -> float:
        """Ends the bar. Returns the seconds since ``start``."""
        seconds = time.monotonic() - self._began
        if self._bar is not None:
            self._due = 0.0
            self._update()
            self._bar.stop()
            self._bar = None
        return seconds


def summary(
    num_before: int, ended: StoredBatch, failures: Counter[str], num_tokens: int, seconds: float
) -> Iterator[str]:
    """Yields the lines to print at the end of a run.

    ``num_before``: lines done by earlier runs. ``failures``: number of failed lines by reason.
    ``num_tokens``: output tokens of this run.
    """
    num_lines, num_now = ended.num_done, ended.num_done - num_before
    counts = f"{ended.num_completed} answered, {ended.num_failed} failed"
    took = f"in {seconds:.1f} s ({num_now / max(seconds, 1e-6):.1f} a second)"
    if num_before:
        yield f"{num_lines} lines: {counts}; {num_now} of them now, {took}"
    else:
        yield f"{num_lines} {'line' if num_lines == 1 else 'lines'} {took}: {counts}"
    tokens = ended.tokens
    cached = f" ({tokens.cached:,} cached)" if tokens.cached else ""
    speed = num_tokens / max(seconds, 1e-6)
    yield f"tokens: {tokens.input:,} input{cached}, {tokens.output:,} output ({speed:,.0f} a second)"
    if failures:
        yield "failed: " + ", ".join(f"{count} {name}" for name, count in failures.most_common())
