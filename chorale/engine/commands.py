"""Administrative commands, which an engine executes between two steps, and their outcome."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

PauseMode = Literal["keep", "wait", "abort"]
Action = Literal[
    "state",
    "pause",
    "resume",
    "sleep",
    "wake_up",
    "reset_prefix_cache",
    "start_profile",
    "stop_profile",
]
SLEEP_IS_OFF = "sleep mode is off; start the engine with --enable-sleep-mode"
PROFILER_IS_OFF = "the profiler is off; start the engine with --profiler-config"
MEMORY = ("weights", "kv_cache")  # the memory that a sleeping engine has released


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``state`` changes nothing. Fields that an action does not use are ignored.

    ``mode``, for pause and sleep: requests are frozen (keep), finish (wait), or end (abort). ``level``, for
    sleep: 0 only pauses, 1 keeps the weights in host memory, 2 drops them. ``tags``, for wake_up: the part of
    ``MEMORY`` to restore; (): all of it. ``clear_cache``, for pause: empty the prefix cache once no request
    runs. ``preempt``, for reset_prefix_cache: take blocks from running requests, which are recomputed.
    """

    action: Action
    mode: PauseMode = "abort"
    level: int = 1
    tags: tuple[str, ...] = ()
    clear_cache: bool = True
    preempt: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """The state after a command. ``success``: False if the prefix cache could not be reset, because running
    requests hold blocks. A sleeping engine is also paused."""

    is_paused: bool
    is_sleeping: bool
    success: bool = True


class DeviceControl(Protocol):
    """Executes the commands that concern the device of an engine."""

    def why_not(self, command: Command) -> str | None:
        """Return why the configuration or the profiler's state does not allow a command, or None."""
        ...

    def execute(self, command: Command) -> None:
        """Release or restore memory (sleep, wake_up), or profile. No step is in flight, except when
        profiling. After a sleep, nothing runs before all memory is restored. Raises ``EngineError``."""
        ...


class NoDeviceControl:
    """The ``DeviceControl`` of an engine whose memory cannot be released."""

    def why_not(self, command: Command) -> str | None:
        if command.action == "sleep" and command.level:
            return SLEEP_IS_OFF
        return PROFILER_IS_OFF if command.action in ("start_profile", "stop_profile") else None

    def execute(self, command: Command) -> None:
        """Never called: ``why_not`` refuses every command."""
