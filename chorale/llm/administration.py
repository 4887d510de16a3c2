"""The methods of ``LLM`` that do not generate: sleep, metrics, the prefix cache, profiling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, get_args

from chorale.engine.commands import MEMORY, Action, Command, Outcome, PauseMode
from chorale.errors import ChoraleError, ConflictError
from chorale.llm.batch import Batch
from chorale.llm.metrics import LlmMetrics, Metric
from chorale.llm.options import as_arguments
from chorale.llm.params import check_names

if TYPE_CHECKING:
    from chorale.llm.engine import OfflineEngine
    from chorale.llm.many_engines import ManyEngines

_TAGS = (*MEMORY, "scheduling")
_PROFILE = dict.fromkeys(
    ("profile_prefix", "delay_iterations", "max_iterations", "profiler_kwargs"), "set it in profiler_config"
)


class Administration:
    """A command waits until a call that runs in another thread has returned. With several engines, all of
    them execute it. Raises ``ConflictError`` if the state of the engine or its arguments do not allow it."""

    _engine: OfflineEngine | ManyEngines
    _metrics: LlmMetrics
    _queued: Batch
    _sleeps = False

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """Return an LLM from a mapping of arguments, or an object that has them as attributes."""
        return cls(**(engine_args if isinstance(engine_args, Mapping) else vars(engine_args)))

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks, of all engines or of one."""
        return self._engine.info.tensor_parallel_size * (len(self._engine.engines) if include_dp else 1)

    def get_metrics(self) -> list[Metric]:
        """Return vLLM's metrics since the start: counters, gauges, histograms, and a vector with drafts."""
        return self._metrics.read()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache, that in host memory included. Returns whether it was emptied."""
        return self._control("reset_prefix_cache", preempt=reset_running_requests).success

    def reset_mm_cache(self) -> None:
        """Do nothing: gpt-oss reads text only."""

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Stop generating. Level 1 moves the weights to host memory and drops the KV cache, level 2 drops
        both, level 0 keeps them. Enqueued prompts run first ("wait"), end ("abort"), or stay ("keep")."""
        if level not in (0, 1, 2) or mode not in get_args(PauseMode):
            modes = ", ".join(get_args(PauseMode))
            raise ValueError(
                f"sleep: level must be 0, 1 or 2 and mode one of {modes}, not {level!r}, {mode!r}"
            )
        if mode == "wait" and not self._sleeps:
            self._engine.run(self._queued.requests(), self._queued.take)
        self._sleeps = self._control("sleep", level=level, mode=mode).is_sleeping
        if mode == "abort":
            self._queued.abort()

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restore memory ("weights", "kv_cache"; None: all) and generate again once all of it is back.
        ``["scheduling"]`` ends a sleep of level 0. Returns whether the engine is awake."""
        wrong = [tag for tag in tags or () if tag not in _TAGS] if not isinstance(tags, str) else [tags]
        if wrong:
            raise ValueError(f"wake_up: tags must be a list of {', '.join(_TAGS)}, not {wrong}")
        self._sleeps = self._control("wake_up", tags=tuple(tags or ())).is_sleeping
        return not self._sleeps

    def start_profile(self, profile_prefix: str | None = None, **options: Any) -> None:
        """Start torch's profiler as ``profiler_config`` says. Options of one session are a ``ValueError``."""
        check_names("start_profile", {"profile_prefix": profile_prefix, **options}, (), _PROFILE)
        self._control("start_profile")

    def stop_profile(self) -> None:
        """End the profile and write its files."""
        self._control("stop_profile")

    def _control(self, action: Action, **fields: Any) -> Outcome:
        try:
            return self._engine.control(Command(action=action, **fields))
        except ChoraleError as error:
            raise in_arguments(error) from None

    def _require_awake(self) -> None:
        self._engine.require_ready()
        if self._sleeps:
            raise ConflictError("the engine sleeps; call wake_up() first")


def in_arguments(error: ChoraleError) -> ChoraleError:
    """Return the error with the names of arguments in place of those of flags."""
    error.message = as_arguments(error.message)
    error.args = (error.message,)
    return error
