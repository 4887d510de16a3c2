"""A rank process runs one rank other than 0: it loads its share of the model and runs the plans it receives.

Started by the engine process (or by ``LLM``) as ``python -m chorale.serve.engine.rank_entry``, with a
``RankStart`` on stdin. It ends when its parent ends or its channel is closed. It sends no results, because
rank 0 computes the same ones.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from chorale.engine.types import SamplingSpec, StepResult
from chorale.errors import ChoraleError, ConfigError, GpuError
from chorale.machine.processes import settle_signals, tune_garbage_collector
from chorale.model.config import ModelConfig
from chorale.parallel.channel import Channel
from chorale.parallel.communicator import ALONE, CommunicationError, Communicator
from chorale.parallel.wire import (
    Adapt,
    Adapted,
    Administer,
    Beat,
    Failed,
    Grammar,
    Machine,
    Opened,
    Plan,
    Ready,
    Stop,
    WorkerCall,
    decode_to_rank,
    encode,
)
from chorale.runtime.adapters import AdapterStore
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.gpu_faults import explained
from chorale.runtime.sampling.grammar import GrammarCache
from chorale.serve.bootstrap import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, read_start
from chorale.serve.engine.build_rank import Phases, build_rank, open_rank
from chorale.serve.engine.ranks import RankStart, connect_rank, make_rank_device
from chorale.serve.logs import configure_logging

logger = logging.getLogger(__name__)
BEAT_SECONDS = 0.5  # interval of heartbeats
IN_FLIGHT = 1  # steps whose results are fetched later, so that the next one is enqueued while they run
PATIENCE = 0.05  # seconds without a plan after which the last result is fetched, to notice a failed device


class EngineGone(Exception):
    """The engine process has ended."""


def main() -> int:
    start = read_start(sys.stdin.buffer, RankStart)
    # The engine process ends this one; stop signals sent to the whole session are ignored here.
    settle_signals((signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM))
    configure_logging(start.log, f"rank{start.rank}")
    channel = Channel(Connection(start.descriptor))
    step = CurrentStep()
    threading.Thread(target=_beat, args=(channel, step), name="beat", daemon=True).start()
    try:
        serving = load_rank(start, channel)
        gc.collect()
        tune_garbage_collector()
        channel.send(encode(Ready()))
        step.communicator = serving.communicator
        with explained("a step failed", serving.gpu):
            run(serving, channel, step)
        serving.executor.shutdown()
        serving.communicator.close()
    except (EngineGone, BrokenPipeError, ConnectionResetError):
        return EXIT_OK
    except Exception as error:
        return _report(error, channel)
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class Serving:
    """A loaded rank."""

    executor: LocalExecutor
    grammars: GrammarCache
    communicator: Communicator
    gpu: str  # label of its GPU (``Hardware.label``)
    adapters: AdapterStore | None


def load_rank(start: RankStart, channel: Channel) -> Serving:
    """Opens the device, connects to the other ranks, and loads this rank's share of the model."""
    config, model = start.config, ModelConfig.load(start.folder)
    device = open_rank(config, model, start.rank)
    hardware = device.hardware
    channel.send(encode(Opened(hardware)))
    machine = decode_to_rank(_receive(channel))
    if not isinstance(machine, Machine):
        raise EngineGone
    grammars = GrammarCache(model.vocab_size)
    with explained("it could not be loaded", hardware.label):
        rank = connect_rank(config, model, device, start.rank, Path(start.meeting_point))
        rank_device = make_rank_device(device, rank, machine)
        found = build_rank(config, Path(start.folder), model, rank_device, grammars, Phases(None))
    if found.precompiler is not None:
        found.precompiler.throttle()
    return Serving(found.executor, grammars, rank.communicator, hardware.label, found.adapters)


@dataclass(slots=True)
class CurrentStep:
    """The step that this rank is launching (on a CPU: computing). The heartbeat thread reads it."""

    communicator: Communicator = ALONE
    began: float | None = None  # monotonic time; None between steps

    @property
    def busy(self) -> float:
        """Returns the seconds since the step began; 0 between steps, and while this rank waits for others."""
        began = self.began
        return 0.0 if began is None or self.communicator.is_waiting else time.monotonic() - began


def run(serving: Serving, channel: Channel, step: CurrentStep) -> None:
    """Handles messages in order until ``Stop``. Raises ``EngineGone``, and any error of a step."""
    executor, grammars, communicator = serving.executor, serving.grammars, serving.communicator
    in_flight: deque[Callable[[], StepResult]] = deque()
    while True:
        if in_flight and not channel.has_message(within=PATIENCE):
            in_flight.popleft()()
            communicator.check()
        message = decode_to_rank(_receive(channel))
        if isinstance(message, Plan):
            step.began = time.monotonic()
            in_flight.append(executor.worker.run(message.step))
            step.began = None
            if len(in_flight) > IN_FLIGHT:
                in_flight.popleft()()  # returns its buffers
                communicator.check()
        elif isinstance(message, WorkerCall):
            message(executor.worker)
        elif isinstance(message, Administer):
            while in_flight:
                in_flight.popleft()()
            channel.send(encode(Ready(executor.control(message.command))))
        elif isinstance(message, Adapt) and serving.adapters is not None:
            adapt(serving.adapters, message, channel)
        elif isinstance(message, Grammar):
            grammars.prepare(SamplingSpec(grammar=message.text), ())
        elif isinstance(message, Stop):
            return


def adapt(adapters: AdapterStore, message: Adapt, channel: Channel) -> None:
    """Starts a call; the answer is sent when it has ended."""

    def answer(done: Future[None]) -> None:
        error, fault = done.exception(), ""
        if error is not None:
            fault = str(error) if isinstance(error, ChoraleError) else f"it failed: {type(error).__name__}"
        with contextlib.suppress(OSError):  # the engine process is gone
            channel.send(encode(Adapted(fault)))

    if message.call == "forget":
        adapters.forget(message.adapter.id)
    elif message.call == "load":
        adapters.load(message.adapter).add_done_callback(answer)
    else:
        adapters.place(message.adapter, message.slot).add_done_callback(answer)


def _receive(channel: Channel) -> bytes:
    data = channel.receive()
    if data is None:
        raise EngineGone
    return data


def _report(error: Exception, channel: Channel) -> int:
    """Tells the engine process why this rank ends. Returns the exit code."""
    reason = "other"
    if isinstance(error, ConfigError):
        reason = "config"
    elif isinstance(error, CommunicationError):
        reason = "exchange"
    else:
        reason = "gpu" if isinstance(error, GpuError) else "other"
        logger.exception("this rank failed")
    message = str(error) if isinstance(error, ChoraleError) else f"{type(error).__name__}: {error}"
    try:
        channel.send(encode(Failed(message, reason)))  # type: ignore[arg-type]
    except OSError:
        pass  # the engine process is gone
    return EXIT_CONFIG if reason == "config" else EXIT_FAILED


def _beat(channel: Channel, step: CurrentStep) -> None:
    """Sends heartbeats. Exits if the engine process has ended, since the main thread may be blocked."""
    done = threading.Event()
    while not done.wait(BEAT_SECONDS):
        try:
            channel.send(encode(Beat(step.busy)))
        except OSError:
            os._exit(EXIT_OK)
