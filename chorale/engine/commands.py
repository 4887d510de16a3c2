"""Administrative commands, which an engine executes between two steps, and their outcome."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from chorale.engine.types import BASE, AdapterRef

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
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "prepare_weight_update",
    "finish_weight_update",
    "abandon_weight_update",
    "update_weight_version",
    "lose_weights",
    "load_adapter",
    "unload_adapter",
]
# The actions of one update, in their order.
UPDATES = ("start_weight_update", "update_weights", "prepare_weight_update", "finish_weight_update")
TRANSFERS = (
    "init_weight_transfer_engine", "shutdown_weight_transfer_engine", *UPDATES, "abandon_weight_update",
)  # fmt: skip
TRANSFER_IS_OFF = "weight transfer is off; start the engine with --weight-transfer-config"
FIRST_VERSION = "default"  # of the weights with which the engine has started
SLEEP_IS_OFF = "sleep mode is off; start the engine with --enable-sleep-mode"
PROFILER_IS_OFF = "the profiler is off; start the engine with --profiler-config"
MEMORY = ("weights", "kv_cache")  # the memory that a sleeping engine has released


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``state`` changes nothing. Fields that an action does not use are ignored.

    ``mode``, for pause and sleep: requests are frozen (keep), finish (wait), or end (abort). ``level``, for
    sleep: 0 only pauses, 1 keeps the weights in host memory, 2 drops them. ``tags``, for wake_up: the part of
    ``MEMORY`` to restore; (): all of it. ``clear_cache``, for pause: empty the prefix cache once no request
    runs. ``preempt``, for reset_prefix_cache: take blocks from running requests, which are recomputed.
    ``info``: ``init_info`` or ``update_info`` of vLLM's weight transfer. ``first_rank``: number of the
    engine's first rank among all engines'. ``version``: the label of the weights; "": the number of updates.
    ``lose_weights``: weights of an update are gone with an earlier process; only an update ends the refusals.
    """

    action: Action
    mode: PauseMode = "abort"
    level: int = 1
    tags: tuple[str, ...] = ()
    clear_cache: bool = True
    preempt: bool = False
    info: dict[str, Any] = {}
    first_rank: int = 0
    version: str = ""
    adapter: AdapterRef = BASE  # for load_adapter, which reads and checks it, and unload_adapter


class Outcome(msgspec.Struct, frozen=True):
    """The state after a command. ``success``: False if the prefix cache could not be reset, because running
    requests hold blocks. A sleeping engine is also paused. ``weight_version``: "" if engines differ."""

    is_paused: bool
    is_sleeping: bool
    success: bool = True
    weight_version: str = FIRST_VERSION


class DeviceControl:
    """Executes the commands that concern the device of an engine. This class is that of an engine whose
    memory cannot be released: it refuses them."""

    def why_not(self, command: Command) -> str | None:
        """Return why the configuration or the profiler's state does not allow a command, or None."""
        if command.action == "sleep" and command.level:
            return SLEEP_IS_OFF
        if command.action in TRANSFERS:
            return TRANSFER_IS_OFF
        return PROFILER_IS_OFF if command.action in ("start_profile", "stop_profile") else None

    def execute(self, command: Command) -> None:
        """Release or restore memory (sleep, wake_up), or profile. No step is in flight, except when
        profiling. After a sleep, nothing runs before all memory is restored. Raises ``EngineError``, and
        ``ConflictError`` if an action of ``TRANSFERS`` fails; an update has then ended without effect."""
