"""Control: executes administrative commands between steps, and keeps the state of a paused engine.

    running ──pause──► paused ──resume──► running         requests are frozen, finish, or end (``PauseMode``)
       └─────sleep──► paused ──► asleep ──wake_up──► running     device memory is released, then restored
    paused ──start_weight_update──► updating ──finish_weight_update──► paused       all weights change at once
                                        └──a failure, or resume──► paused          the old weights stay
    running ──start_weight_update──► updating, requests frozen ──its end──► running    vLLM needs no pause

A command that must wait for requests or for a step in flight (pause, sleep, start_weight_update) is finished
by a later step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from chorale.engine.commands import MEMORY, TRANSFERS, UPDATES, Command, DeviceControl, Outcome, PauseMode
from chorale.engine.engine_state import EngineState
from chorale.engine.scheduling.scheduler import Scheduler
from chorale.engine.types import GenerateRequest
from chorale.errors import ConflictError, EngineDeadError

ASLEEP = "the engine sleeps; wake it up first"
PAUSED = "generation is paused; retry after it resumes"
WEIGHTS_LOST = (
    "the engine was restarted and has the weights of its start again; update its weights, or let it sleep at "
    "level 2 and wake up to use these"
)


class Control:
    """The pause and the sleep of one engine. ``held``: requests that arrived meanwhile, by id."""

    def __init__(
        self,
        engine: EngineState,
        scheduler: Scheduler,
        device: DeviceControl,
        abort_all: Callable[[], None],
        is_drained: Callable[[], bool],
    ) -> None:
        """``abort_all`` ends every request; ``is_drained`` returns whether none is left, nor a step or
        chunk."""
        self._engine, self._scheduler, self._device = engine, scheduler, device
        self._abort_all, self._is_drained = abort_all, is_drained
        self.held: dict[str, GenerateRequest] = {}
        self._refuses = False  # new requests are refused; otherwise they are held
        self._has_lost_weights = False
        self.sleep_level: int | None = None
        self._mode: PauseMode | None = None
        self._missing: set[str] = set()  # released memory
        self._is_updating = False
        self._is_paused_by_update = False
        self._num_updates = 0
        self._unfinished: list[tuple[Command, Future[Outcome]]] = []

    @property
    def is_paused(self) -> bool:
        return self._mode is not None

    @property
    def refusal(self) -> str:
        """Returns why new requests are refused, or ""."""
        if self._has_lost_weights:
            return WEIGHTS_LOST
        return PAUSED if self._refuses else ""

    @property
    def is_frozen(self) -> bool:
        """Returns whether no step may be planned: requests are kept as they are, memory is missing, or the
        weights change."""
        return self._mode == "keep" or bool(self._missing) or self._is_updating

    @property
    def has_memory(self) -> bool:
        return not self._missing

    def execute(self, command: Command) -> Future[Outcome]:
        """Execute a command, now or in a later step. The future has a ``ConflictError`` if the state does not
        allow it. Raises ``EngineError`` if the device fails; the engine cannot be used any more then."""
        future: Future[Outcome] = Future()
        must_wait = command.action in ("pause", "sleep")
        try:
            self._check(command)
            if command.action == "start_weight_update" and not self.is_paused:
                must_wait = True
            elif command.action in TRANSFERS:
                self._transfer(command)
        except ConflictError as error:
            future.set_exception(error)
            return future
        if must_wait:
            self._pause(command)
            self._unfinished.append((command, future))
            self.settle()
            return future
        if command.action == "load_adapter":
            return self._load_adapter(command)
        success = True
        if command.action == "resume":
            self._resume()
        elif command.action == "wake_up":
            self._wake_up(command)
        elif command.action == "reset_prefix_cache":
            success = self._reset_cache(preempt=command.preempt)
        elif command.action == "update_weight_version":
            self._engine.set_weight_version(command.version)
        elif command.action == "lose_weights":
            self._has_lost_weights = True
        elif command.action == "unload_adapter":
            self._engine.adapters.forget(command.adapter)
        elif command.action not in ("state", *TRANSFERS):
            self._device.execute(command)
        future.set_result(self._outcome(success=success))
        return future

    def _check(self, command: Command) -> None:
        if self._missing and command.action in ("pause", "resume", "start_profile", "stop_profile"):
            raise ConflictError(ASLEEP)
        if command.action in UPDATES:
            self._check_update(starts=command.action == "start_weight_update")
        if self._is_updating and command.action == "sleep":
            raise ConflictError("a weight update is in progress; finish it, or give it up with resume")
        if command.action in ("load_adapter", "unload_adapter"):
            reason = self._engine.adapters.refusal(command.adapter)
        else:
            reason = self._device.why_not(command)
        if reason is not None:
            raise ConflictError(reason)

    def _load_adapter(self, command: Command) -> Future[Outcome]:
        """The future is done once the adapter is read; its exception is an ``AdapterError``."""
        future: Future[Outcome] = Future()

        def finish(loaded: Future[None]) -> None:
            error = loaded.exception()
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(self._outcome())

        self._engine.adapters.load(command.adapter).add_done_callback(finish)
        return future

    def _outcome(self, *, success: bool = True) -> Outcome:
        version = self._engine.served_version
        return Outcome(self.is_paused, self.sleep_level is not None, success, version)

    # ------------------------------------------------------------------ pause and sleep

    def _pause(self, command: Command) -> None:
        self._is_paused_by_update = command.action == "start_weight_update"
        if self._is_paused_by_update:
            self._mode = "keep"
            return
        if command.action == "pause":
            self._refuses = command.mode != "keep"
        if self._missing:
            return  # requests are frozen already
        self._mode = command.mode
        if command.mode == "abort":
            self._abort_all()

    def settle(self) -> None:
        """Finish the commands that wait, if requests and steps allow it. Raises like ``execute``."""
        while self._unfinished:
            still = self._engine.is_still if self.is_frozen else self._is_drained()
            if not still:
                return
            command, future = self._unfinished.pop(0)
            if command.action == "sleep":
                self._sleep(command.level)
            elif command.action == "start_weight_update":
                try:
                    self._transfer(command)
                except ConflictError as error:
                    future.set_exception(error)
                    continue
            elif command.clear_cache and self._mode != "keep":
                self._reset_cache()
            future.set_result(self._outcome())

    def _sleep(self, level: int) -> None:
        if level == 0 and not self._missing:
            self.sleep_level = 0
            return
        if len(self._missing) < len(MEMORY) or level > (self.sleep_level or 0):
            self._scheduler.preempt_all()
            self._engine.cache.forget_all()
            self.sleep_level = level
            self._missing = set(MEMORY)
            self._device.execute(Command(action="sleep", level=level))
            if level == 2:  # the checkpoint will be read again
                self._engine.set_weight_version()
                self._has_lost_weights = False

    def _resume(self) -> None:
        """End the pause. An unfinished pause, sleep or weight update is cancelled."""
        if self._is_updating:
            self._transfer(Command(action="abandon_weight_update"))
        for _, future in self._unfinished:
            future.set_exception(ConflictError("another command ended the pause before it was complete"))
        self._unfinished.clear()
        self._mode = self.sleep_level = None
        self._refuses = self._is_paused_by_update = False

    def _wake_up(self, command: Command) -> None:
        wanted = tuple(tag for tag in MEMORY if tag in self._missing and tag in (command.tags or MEMORY))
        if wanted:
            self._device.execute(Command(action="wake_up", tags=wanted))
            self._missing.difference_update(wanted)
        if not self._missing:
            self._resume()

    # ------------------------------------------------------------------ weight updates

    def _check_update(self, *, starts: bool) -> None:
        if starts is self._is_updating:
            raise ConflictError(
                "a weight update is in progress; resume gives it up"
                if starts
                else "no weight update is in progress"
            )
        if starts and not self.is_paused:
            return
        if self._unfinished or not self._engine.is_still or "weights" in self._missing:
            raise ConflictError("weights can be updated only while the engine is paused, and not asleep")

    def _transfer(self, command: Command) -> None:
        """Execute a command of weight transfer. Raises ``ConflictError``; an update has then ended."""
        self._is_updating = self._is_updating and command.action not in (*UPDATES, "abandon_weight_update")
        try:
            self._device.execute(command)
        except ConflictError:
            self._end_update()
            raise
        if command.action in UPDATES[:-1]:
            self._is_updating = True
        elif command.action == "abandon_weight_update":
            self._end_update()
        elif command.action == "finish_weight_update":
            self._num_updates += 1
            self._has_lost_weights = False
            # The keys and values of the old weights must not meet those of the new ones.
            self._scheduler.preempt_all()
            self._engine.cache.forget_all()
            self._engine.set_weight_version(command.version or str(self._num_updates))
            self._end_update()

    def _end_update(self) -> None:
        if self._is_paused_by_update and not self._is_updating:
            self._resume()

    def _reset_cache(self, *, preempt: bool = False) -> bool:
        if preempt:
            self._scheduler.preempt_all()
        pool = self._engine.cache.pool
        if pool.num_free < pool.num_blocks:
            return False  # running requests hold the others
        self._engine.cache.forget_all()
        return True

    def fail(self) -> None:
        """Forget requests and commands that wait, because the engine has failed."""
        self.held.clear()
        for _, future in self._unfinished:
            future.set_exception(EngineDeadError("the engine failed"))
        self._unfinished.clear()
