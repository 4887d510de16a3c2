"""RankProcesses: starts the other ranks of an engine, watches them, and ends them.

One thread does all of this. It starts the processes, because Linux ends a child with the thread that started
it, and this thread lives as long as the ranks. It reads their messages, notices when one ends or is silent,
and finds the rank that broke first: the others fail too, as soon as an exchange with it fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe

from chorale.errors import ChoraleError, ConfigError, EngineDeadError, EngineError, GpuError
from chorale.machine.hardware import Hardware
from chorale.machine.processes import HEARTBEAT_TIMEOUT, Pulse
from chorale.parallel.channel import Channel
from chorale.parallel.communicator import CommunicationError
from chorale.parallel.rank_state import Loss, RankState, first_loss
from chorale.parallel.wire import Adapt, Stop, decode_from_rank, encode

logger = logging.getLogger(__name__)
LOOK_SECONDS = 0.1  # interval of checks of the processes
CAUSE_SECONDS = 0.3  # wait for reports of other ranks after one has failed
ESCAPE_SECONDS = 1.5  # time for the engine's thread to notice a failure
STOP_SECONDS = 5.0  # time for ranks to end by themselves

# (rank, descriptor of its channel) -> (command, data for its standard input)
Launch = Callable[[int, int], tuple[Sequence[str], bytes]]


@dataclass(slots=True)
class _Shared:
    """State shared by both threads, protected by the condition's lock."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    loss: Loss | None = None
    is_closing: bool = False


class RankProcesses:
    """All ranks except rank 0. Methods raise ``EngineError`` or ``ConfigError`` with the number of a lost
    rank."""

    def __init__(
        self,
        size: int,
        launch: Launch,
        on_lost: Callable[[ChoraleError], None] | None = None,
        hidden: Sequence[str] = (),
        timeout: float = HEARTBEAT_TIMEOUT,
    ) -> None:
        """``on_lost`` is called in another thread if the engine's thread does not notice a loss in time
        (``check``, ``cause``), for example because it waits for a device that waits for a lost rank.
        ``hidden``: environment variables that ranks do not inherit. ``timeout``: seconds of silence after
        which a rank counts as hanging."""
        self._timeout = timeout
        self._size, self._launch, self._on_lost, self._hidden = size, launch, on_lost, hidden
        self._ranks: list[RankState] = []
        self._shared = _Shared()
        self._started, self._acknowledged = threading.Event(), threading.Event()
        self._abort: Callable[[], None] | None = None
        self._start_error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            self.close()
            raise EngineError(f"a rank could not be started: {self._start_error}")

    # ------------------------------------------------------------------ the engine's thread

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._ranks]

    def opened(self) -> list[Hardware]:
        """Wait until all ranks have opened their devices, and return these."""
        self._wait(lambda: all(each.hardware for each in self._ranks))
        return [each.hardware for each in self._ranks if each.hardware is not None]

    def wait_ready(self) -> None:
        """Wait until all ranks accept plans."""
        self._wait(lambda: all(each.is_ready for each in self._ranks))

    def carry_out(self, data: bytes, own: Callable[[], str]) -> str:
        """Send a long task to every rank, run rank 0's ``own`` part, and wait until all have done it. Returns
        why the first rank of those that refuse it has done so, or "".

        Meanwhile a rank may be silent for as long as while it loads."""
        with self._shared.changed:
            for each in self._ranks:
                each.is_ready = False
        self.send(data)
        refusals = [own()]
        self.wait_ready()
        return next(filter(None, [*refusals, *(each.refusal for each in self._ranks)]), "")

    def abort_by(self, abort: Callable[[], None]) -> None:
        """Set the function that aborts current exchanges when a rank is lost."""
        self._abort = abort

    def send(self, data: bytes) -> None:
        """Send one encoded message to every rank."""
        self.check()
        try:
            for each in self._ranks:
                each.channel.send(data)
        except OSError as error:
            raise self.cause(CommunicationError(f"a rank cannot be reached: {error}")) from error

    def adapt(self, message: Adapt) -> list[Future[None]]:
        """Send a call that every rank answers. Returns the futures of the answers."""
        answers: list[Future[None]] = [Future() for _ in self._ranks]
        for each, answer in zip(self._ranks, answers, strict=True):
            each.adapted.append(answer)
        self.send(encode(message))
        return answers

    def check(self) -> None:
        """Raise if a rank was lost."""
        loss = self._shared.loss
        if loss is not None:
            self._acknowledged.set()
            raise loss.error()

    def cause(self, own: EngineError) -> ConfigError | EngineError:
        """Return the error that came first: that of the lost rank, for which this waits briefly, or ``own``,
        the error of rank 0."""
        if isinstance(own, GpuError):
            self._acknowledged.set()
            return GpuError(f"rank 0: {own.message}")
        with self._shared.changed:
            self._shared.changed.wait_for(
                lambda: self._shared.loss, timeout=CAUSE_SECONDS + 10 * LOOK_SECONDS
            )
            loss = self._shared.loss
        self._acknowledged.set()
        if loss is None or (loss.reason == "exchange" and not isinstance(own, CommunicationError)):
            # It has the number of the rank for which rank 0 has waited.
            named = isinstance(own, CommunicationError)
            return own if named else EngineError(f"rank 0: {own.message}")
        return loss.error()

    def stop(self) -> None:
        """Tell all ranks to end; those that do not are killed after ``STOP_SECONDS``. Idempotent."""
        with self._shared.changed:
            if self._shared.is_closing:
                return
            self._shared.is_closing = True
        for each in self._ranks:
            with contextlib.suppress(OSError):
                each.channel.send(encode(Stop()))

    def close(self) -> None:
        """``stop``, and wait until all ranks have ended. Idempotent."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wait(self, is_done: Callable[[], object]) -> None:
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._shared.loss or is_done())
        self.check()

    # ------------------------------------------------------------------ the watching thread

    def _run(self) -> None:
        try:
            for rank in range(1, self._size):
                self._ranks.append(self._start(rank))
        except OSError as error:
            self._start_error = error
        finally:
            self._started.set()
        try:
            self._follow()
        finally:
            self._end()

    def _start(self, rank: int) -> RankState:
        ours, theirs = Pipe()
        try:
            with theirs:
                process, start = self._spawn(rank, theirs.fileno())
        except OSError:
            ours.close()
            raise
        with contextlib.suppress(BrokenPipeError):  # the rank has ended, which the loop notices
            if process.stdin is not None:
                with process.stdin as stream:
                    stream.write(start)
        pulse = Pulse(process.pid, time.monotonic())
        return RankState(rank, process, Channel(ours), pulse, self._timeout)

    def _spawn(self, rank: int, descriptor: int) -> tuple[subprocess.Popen[bytes], bytes]:
        """Return the process and the data for its standard input. It gets its own session, so Ctrl-C does not
        reach it."""
        command, start = self._launch(rank, descriptor)
        environment = {name: value for name, value in os.environ.items() if name not in self._hidden}
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a waiting thread must not take a core
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environment, pass_fds=(descriptor,), start_new_session=True
        )
        return process, start

    def _follow(self) -> None:
        """Read messages until the engine closes or a rank is lost."""
        with selectors.DefaultSelector() as selector:
            for each in self._ranks:
                selector.register(each.channel.connection, selectors.EVENT_READ, each)
            troubled_at: float | None = None
            while not self._shared.is_closing:
                for key, _ in selector.select(LOOK_SECONDS):
                    self._read(key.data)
                    if not key.data.is_open:
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                for each in self._ranks:
                    each.judge(now)
                if troubled_at is None and any(each.trouble for each in self._ranks):
                    troubled_at = now
                if troubled_at is not None and now - troubled_at >= CAUSE_SECONDS:
                    if not self._shared.is_closing:
                        self._lose()
                    return

    def _read(self, each: RankState) -> None:
        data = each.channel.receive()
        if data is None:
            each.is_open = False
            return
        with self._shared.changed:
            each.hear(decode_from_rank(data), time.monotonic())
            self._shared.changed.notify_all()

    def _lose(self) -> None:
        """Find the rank that broke first, report it to the engine's thread, and make sure that the engine
        ends."""
        loss = first_loss(self._ranks)
        with self._shared.changed:
            self._shared.loss = loss
            self._shared.changed.notify_all()
        for each in self._ranks:  # then exchanges with a rank that hangs fail
            each.process.kill()
        if self._abort is not None:
            self._abort()
        if self._on_lost is not None and not self._acknowledged.wait(ESCAPE_SECONDS):
            self._on_lost(loss.error())

    def _end(self) -> None:
        """End the remaining ranks. Ranks end by themselves on ``Stop`` or when their channel closes."""
        lost = self._shared.loss is not None or self._acknowledged.is_set()  # the latter: rank 0 has failed
        deadline = time.monotonic() + (0.0 if lost else STOP_SECONDS)
        for each in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, deadline - time.monotonic()))
            if each.process.poll() is None:
                each.process.kill()
            each.process.wait()
            each.channel.close()
            for future in each.adapted:
                future.set_exception(EngineDeadError("the engine has ended"))
