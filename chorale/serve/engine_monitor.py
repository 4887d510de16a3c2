"""EngineMonitor: starts the engine process, kills it when it hangs, and restarts it when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import zmq

from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.wire import curve
from chorale.client.wire.messages import DECODE_ERRORS, decode_heartbeat
from chorale.machine.platforms import CUDA, find_platform
from chorale.machine.processes import how_ended, module_command
from chorale.machine.tasks import end_tasks
from chorale.serve.bootstrap import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    SECRET_VARIABLES,
    TOOL_KEY_VARIABLES,
    EngineStart,
    Failure,
    take_failure,
)
from chorale.serve.watch import EnginePulse, RestartPolicy, WatchLimits

logger = logging.getLogger(__name__)
ENGINE_COMMAND = module_command("chorale.serve.engine.process")
WATCH_INTERVAL = 0.1  # seconds between two checks of the heartbeats
SPAWN_LOCK = threading.Lock()  # uvloop cannot start processes from loops of two threads at the same time
SPAWN_RETRY = 0.005  # seconds between two attempts to acquire the lock

OnStatus = Callable[[EngineStatus, EngineInfo | None], None]


async def spawn(command: Sequence[str], start: msgspec.Struct, *, pass_fds: Sequence[int] = ()) -> Process:
    """Starts a child process and sends it ``start`` on standard input.

    The child has its own session, so Ctrl-C in a terminal reaches only the supervisor. API keys are removed
    from its environment.
    """
    hidden = SECRET_VARIABLES + (TOOL_KEY_VARIABLES if isinstance(start, EngineStart) else ())
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    # Idle OpenMP threads must sleep: spinning threads would take CPU time from the HTTP processes.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(start, EngineStart):
        environment |= start.environment
    while not SPAWN_LOCK.acquire(blocking=False):  # a blocking call would block the event loop
        await asyncio.sleep(SPAWN_RETRY)
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, env=environment, start_new_session=True, pass_fds=tuple(pass_fds)
        )
    finally:
        SPAWN_LOCK.release()
    stdin = process.stdin
    if stdin is not None:
        # If the child has exited, its caller will notice. uvloop raises RuntimeError for a closed pipe.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, RuntimeError):
            stdin.write(msgspec.msgpack.encode(start))
            await stdin.drain()
            stdin.close()
    return process


async def end(process: Process, grace: float) -> int:
    """Sends SIGTERM, then SIGKILL after ``grace`` seconds. Returns the exit code."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            return await asyncio.wait_for(process.wait(), grace)
        except TimeoutError:
            logger.warning("process %d did not end within %.0f s: killed", process.pid, grace)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return await process.wait()


class EngineMonitor:
    """Keeps one engine process running. ``run`` returns an exit code when stopped or after giving up."""

    def __init__(
        self,
        start: EngineStart,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        limits: WatchLimits | None = None,
        on_status: OnStatus | None = None,
    ) -> None:
        self._start, self._command = start, tuple(command)
        self._limits = limits or WatchLimits()
        self._timeout = self._limits.heartbeat_timeout or start.config.heartbeat_timeout
        self._on_status = on_status
        self._restart_policy = RestartPolicy(self._limits)
        self._stopping = asyncio.Event()
        self._last: tuple[EngineStatus, EngineInfo | None] | None = None
        self.failure: Failure | None = None  # reason for giving up
        self._was_ready = False  # whether the running or last engine process has become ready
        self.pid: int | None = None  # process id of the running engine process
        self.num_restarts = 0
        self._ran_on: str | None = None  # name of the GPU used by this or an earlier engine process

    def stop(self) -> None:
        """Ask ``run`` to end the engine process and return."""
        self._stopping.set()

    async def run(self) -> int:
        while True:
            code, hang_reason = await self._run_once()
            if self._stopping.is_set():
                return EXIT_OK
            failure = take_failure(self._start.directory)
            if failure is None:
                failure = Failure(hang_reason or f"the engine process {how_ended(code)}", deterministic=False)
            if failure.deterministic:  # a configuration error: the status has the message
                return self._give_up(self._with_lost_gpu(failure), EXIT_CONFIG)
            logger.error("%s", failure.message)
            delay = self._restart_policy.add(
                time.monotonic(),
                was_ready=self._was_ready,
                is_gpu=failure.is_gpu,
                is_hang=hang_reason is not None,
            )
            if delay is None:
                return self._give_up(self._why_no_restart(failure), EXIT_FAILED)
            self._last = None  # report every crash, even one like the last
            self._report_status(
                EngineStatus("dead", message=f"{failure.message}; restarting in {delay:.1f} s")
            )
            if await self._stopped_within(delay):
                return EXIT_OK
            self.num_restarts += 1

    def _give_up(self, failure: Failure, code: int) -> int:
        self.failure = failure
        self._report_status(EngineStatus("failed", message=failure.message))
        return code

    def _why_no_restart(self, failure: Failure) -> Failure:
        if not failure.is_gpu:
            return failure
        limits = self._limits
        times = f"{limits.max_gpu_faults} times in {limits.gpu_faults_window / 60:.0f} min"
        return msgspec.structs.replace(
            failure, message=f"a GPU's hardware failed {times}, no restart: {failure.message}"
        )

    def _with_lost_gpu(self, failure: Failure) -> Failure:
        """Adds a hint that the GPU was lost, if an earlier engine process ran on one."""
        if self._ran_on is None:
            return failure
        is_nvidia = find_platform(self._start.config.device) is CUDA
        sign = "nvidia-smi -L does not list it any more (Xid 79 in dmesg)"
        sign = sign if is_nvidia else "the driver does not list it any more"
        return msgspec.structs.replace(
            failure,
            message=f"{failure.message}. This engine ran on {self._ran_on} before: if {sign}, "
            "reboot or drain the machine",
        )

    def _remember_gpu(self, info: EngineInfo) -> None:
        """Replaces the device ``auto``, with which a restart would use the CPU after the GPU is lost."""
        if self._ran_on is not None or info.device.lower().startswith("cpu"):
            return
        self._ran_on = info.device
        config = self._start.config
        if config.device == "auto":
            kind = (find_platform("auto") or CUDA).kind
            self._start = msgspec.structs.replace(self._start, config=replace(config, device=kind))

    async def _stopped_within(self, delay: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)
        return self._stopping.is_set()

    async def _run_once(self) -> tuple[int, str | None]:
        """Runs one engine process. Returns its exit code, and the reason if it was killed because it hung."""
        self._was_ready = False
        config = self._start.config
        timeout = self._timeout * self._restart_policy.growth(time.monotonic())
        start = msgspec.structs.replace(
            self._start, config=replace(config, heartbeat_timeout=timeout), restarts=self.num_restarts
        )
        try:
            process = await spawn(self._command, start, pass_fds=start.inherited)
        except OSError as error:  # no memory or file descriptors: counts as a crash, as it may be temporary
            return EXIT_FAILED, f"the engine process could not be started: {error}"
        self.pid = process.pid
        watching = asyncio.ensure_future(self._watch(process.pid, timeout))
        tasks = [
            asyncio.ensure_future(process.wait()),
            asyncio.ensure_future(self._stopping.wait()),
            watching,
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            hang_reason = watching.result() if watching.done() and process.returncode is None else None
            if hang_reason is not None:
                logger.error("killing the engine process %d, which hangs: %s", process.pid, hang_reason)
                await self._dump_and_kill(process)
            return await end(process, self._limits.kill_grace), hang_reason
        finally:
            self.pid = None
            await end_tasks(*tasks)
            if process.returncode is None:  # cancelled: leave no orphan
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    async def _dump_and_kill(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)  # faulthandler writes every thread's stack to stderr
            await asyncio.sleep(self._limits.dump_grace)
            process.kill()

    async def _watch(self, pid: int, timeout: float) -> str:
        """Reads the heartbeats of the engine process until it hangs. Returns the reason."""
        pulse = EnginePulse(self._limits, timeout, pid, time.monotonic())
        with zmq.Context() as context, context.socket(zmq.SUB) as heartbeats:
            heartbeats.setsockopt(zmq.LINGER, 0)
            heartbeats.setsockopt(zmq.RECONNECT_IVL, 50)
            heartbeats.subscribe(b"")
            address = self._start.address
            curve.enter(heartbeats, address.public_key)
            heartbeats.connect(address.beats)
            while True:
                # This loop may have been delayed, so read all heartbeats before checking for silence.
                self._read_heartbeats(heartbeats, pulse)
                hang_reason = pulse.hang_reason(time.monotonic())
                if hang_reason is not None:
                    return hang_reason
                await asyncio.sleep(WATCH_INTERVAL)

    def _read_heartbeats(self, heartbeats: zmq.Socket[bytes], pulse: EnginePulse) -> None:
        while True:
            try:
                beat = decode_heartbeat(heartbeats.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except DECODE_ERRORS as error:
                logger.error("dropped a heartbeat that cannot be decoded: %s", error)
                continue
            if beat.pid == self.pid:
                pulse.hear(beat, time.monotonic())
                self._was_ready = self._was_ready or beat.state == "ready"
                if beat.info is not None:
                    self._remember_gpu(beat.info)
                self._report_status(beat.status, beat.info)

    def _report_status(self, status: EngineStatus, info: EngineInfo | None = None) -> None:
        if self._on_status is not None and self._last != (status, info):
            self._last = (status, info)
            self._on_status(status, info)
