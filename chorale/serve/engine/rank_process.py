"""A rank process: the ranks from 1 on. Loads its share of the model, then runs each plan that it receives.

Started by the engine process (or by ``LLM``) as ``python -m chorale.serve.engine.rank_entry``, with a
``RankStart`` on stdin. It ends with its parent, and when its channel ends. Results are not sent: rank 0 has
the same ones.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chorale.engine.types import SamplingSpec, StepResult
from chorale.errors import ChoraleError, ConfigError, GpuError
from chorale.machine.processes import settle_signals, tune_garbage_collector
from chorale.model.config import ModelConfig
from chorale.parallel.channel import Channel
from chorale.parallel.communicator import ALONE, CommunicationError, Communicator
from chorale.parallel.distributed import connect
from chorale.parallel.wire import (
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
from chorale.runtime.device import Device
from chorale.runtime.gpu_faults import explained
from chorale.runtime.sampling.grammar import GrammarCache
from chorale.runtime.worker import Worker
from chorale.serve.bootstrap import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, read_start
from chorale.serve.engine.build_rank import Phases, build_rank, open_rank
from chorale.serve.engine.ranks import RankStart, make_place
from chorale.serve.logs import configure_logging

logger = logging.getLogger(__name__)
BEAT_SECONDS = 0.5
IN_FLIGHT = 1  # steps whose results are fetched later: the device works while the next is enqueued
PATIENCE = 0.05  # seconds without a plan after which the last result is fetched, to notice a failed device


class EngineGone(Exception):
    """The engine process has ended, or wants this one to."""


def main() -> int:
    start = read_start(sys.stdin.buffer, RankStart)
    # The engine process decides when it ends; a stop signal of the whole session is meant for that process.
    settle_signals((signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM))
    configure_logging(start.log, f"rank{start.rank}")
    channel = Channel(socket.socket(fileno=start.descriptor))
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
    except (EngineGone, BrokenPipeError, ConnectionResetError):
        return EXIT_OK
    except Exception as error:
        return _report(error, channel)
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class Serving:
    """A rank that takes plans."""

    worker: Worker
    grammars: GrammarCache
    communicator: Communicator
    gpu: str  # ``Hardware.label``


def load_rank(start: RankStart, channel: Channel) -> Serving:
    """Opens the device, meets the other ranks, and loads this rank's share."""
    config, model = start.config, ModelConfig.load(start.folder)
    device = open_rank(config, model, start.rank)
    hardware = device.hardware
    channel.send(encode(Opened(hardware)))
    machine = decode_to_rank(_receive(channel))
    if not isinstance(machine, Machine):
        raise EngineGone

    def meet(rank: int, size: int, device: Device) -> Communicator:
        return connect(Path(start.meeting_point), rank, size, device.torch_device)

    grammars = GrammarCache(model.vocab_size)
    with explained("it could not be loaded", hardware.label):
        place = make_place(config, model, device, start.rank, machine, meet)
        found = build_rank(config, Path(start.folder), model, place, grammars, Phases(None))
    if found.precompiler is not None:
        found.precompiler.throttle()
    assert place.rank is not None
    return Serving(found.executor.take_worker(), grammars, place.rank.communicator, hardware.label)


@dataclass(slots=True)
class CurrentStep:
    """The step that this rank launches (a CPU: computes); the thread of the beats reads it."""

    communicator: Communicator = ALONE
    began: float | None = None

    @property
    def busy(self) -> float:
        """Seconds since it began; 0 without a step, and while this rank waits for others."""
        began = self.began
        return 0.0 if began is None or self.communicator.is_waiting else time.monotonic() - began


def run(serving: Serving, channel: Channel, step: CurrentStep) -> None:
    """Does what arrives, in order. Raises ``EngineGone`` at the end, and whatever a step raises."""
    worker, grammars, communicator = serving.worker, serving.grammars, serving.communicator
    in_flight: deque[Callable[[], StepResult]] = deque()
    while True:
        if in_flight and not channel.has_message(within=PATIENCE):
            in_flight.popleft()()
            communicator.check()
        message = decode_to_rank(_receive(channel))
        if isinstance(message, Plan):
            step.began = time.monotonic()
            in_flight.append(worker.run(message.step))
            step.began = None
            if len(in_flight) > IN_FLIGHT:
                in_flight.popleft()()  # gives its buffers back
                communicator.check()
        elif isinstance(message, WorkerCall):
            message(worker)
        elif isinstance(message, Grammar):
            grammars.prepare(SamplingSpec(grammar=message.text), ())
        elif isinstance(message, Stop):
            raise EngineGone


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
    """Says that this process lives. Ends it if the engine process is gone: its own thread may be waiting."""
    done = threading.Event()
    while not done.wait(BEAT_SECONDS):
        try:
            channel.send(encode(Beat(step.busy)))
        except OSError:
            os._exit(EXIT_OK)
