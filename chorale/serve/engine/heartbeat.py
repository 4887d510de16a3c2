"""HeartbeatThread: sends heartbeats from the engine process, independently of its main thread.

A heartbeat contains the time for which the current step has been running, so a hung step is noticed. A long
step does not look like a dead process: device work releases the GIL, and heartbeats continue.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

import zmq

from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.wire import curve
from chorale.client.wire.messages import Heartbeat, encode, heartbeat_address
from chorale.engine.types import EngineStats
from chorale.serve.bootstrap import EngineStart

NUM_STEPS_REMEMBERED = 1024
MIN_GAP = 0.02  # least seconds between heartbeats
ANNOUNCED = 1.0  # most seconds to wait until the heartbeat that announces a task is sent
LAST_HEARTBEAT_LINGER_MS = 200


class HeartbeatThread:
    """Owns the PUB socket. The main thread only assigns attributes, which is atomic."""

    def __init__(self, start: EngineStart, engine_id: str) -> None:
        self._start, self.engine_id = start, engine_id
        # The status and the info are replaced together, so no lock is needed.
        self._public: tuple[EngineStatus, EngineInfo | None] = EngineStatus("loading", phase="start"), None
        self._wake, self._sent = threading.Event(), threading.Event()
        self._task = ""
        self._stopping = False
        self._step_started: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=NUM_STEPS_REMEMBERED)
        self._p99, self._p99_at = 0.0, 0  # percentile, and the number of steps when it was computed
        self._num_steps = 0
        self.stats = EngineStats()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def loading(self, phase: str, fraction: float | None = None, message: str = "") -> None:
        """Show the progress of the start. ``fraction``: from 0 to 1 within the phase."""
        self._show(EngineStatus("loading", phase, fraction, message))

    def ready(self, info: EngineInfo) -> None:
        self._show(EngineStatus("ready"), info)

    def draining(self) -> None:
        self._show(EngineStatus("draining"), self._public[1])

    def _show(self, status: EngineStatus, info: EngineInfo | None = None) -> None:
        self._public = status, info
        self._wake.set()

    def announce(self, task: str) -> None:
        """Tell observers about a long task, before it begins; "" ends it."""
        self._task = task
        self._sent.clear()
        self._wake.set()
        if task:
            self._sent.wait(ANNOUNCED)

    def step_begins(self) -> None:
        self._step_started = time.monotonic()

    def step_ends(self) -> None:
        started = self._step_started
        if started is not None:
            self._step_seconds.append(time.monotonic() - started)
            self._num_steps += 1
        self._step_started = None

    def stop(self) -> None:
        """Sends a last heartbeat and ends the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        context = zmq.Context()
        socket: zmq.Socket[bytes] = context.socket(zmq.PUB)
        socket.setsockopt(zmq.LINGER, LAST_HEARTBEAT_LINGER_MS)
        tcp = None if self._start.tcp is None else self._start.tcp.beats
        curve.bind(socket, heartbeat_address(self._start.directory), tcp)
        while not self._stopping:
            socket.send(encode(self._heartbeat()))
            self._sent.set()
            self._wake.wait(self._start.heartbeat_interval)
            self._wake.clear()
            time.sleep(MIN_GAP)
        socket.send(encode(self._heartbeat()))
        socket.close()
        context.term()

    def _heartbeat(self) -> Heartbeat:
        (status, info), started = self._public, self._step_started
        return Heartbeat(
            engine_id=self.engine_id,
            pid=os.getpid(),
            timeout=self._start.config.heartbeat_timeout,  # with more silence, this engine counts as hung
            state=status.state,  # type: ignore[arg-type]  # never "dead"
            phase=status.phase,
            progress=status.progress,
            message=status.message,
            step_seconds=time.monotonic() - started if started is not None else 0.0,
            p99_step_seconds=self._p99_step_seconds(),
            stats=self.stats,
            info=info,
            restarts=self._start.restarts,
            task=self._task,
        )

    def _p99_step_seconds(self) -> float:
        if self._num_steps != self._p99_at:
            self._p99_at = self._num_steps
            ordered = sorted(self._step_seconds.copy())
            self._p99 = ordered[int(0.99 * (len(ordered) - 1))]
        return self._p99
