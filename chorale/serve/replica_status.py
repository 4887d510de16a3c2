"""ReplicaStatuses: merges the statuses of several engines into one for the operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.summary import merge_info
from chorale.serve.engine_monitor import OnStatus


class ReplicaStatuses:
    """Provides the ``on_status`` callback of each monitor, and calls that of the command line.

    The command line gets "loading" from the first engine that is still loading, "ready" once each engine is
    ready or has failed, "dead" with the index of an engine that dies, and "failed" once all have failed.
    """

    def __init__(self, num_replicas: int, on_status: OnStatus | None) -> None:
        self._on_status = on_status
        self._statuses = [EngineStatus("loading")] * num_replicas
        self._infos: list[EngineInfo | None] = [None] * num_replicas
        self._was_ready = False

    def callback(self, index: int) -> OnStatus | None:
        """Returns the callback of a monitor. With one engine it is that of the command line."""
        if len(self._statuses) == 1:
            return self._on_status
        return partial(self._changed, index)

    def _changed(self, index: int, status: EngineStatus, info: EngineInfo | None) -> None:
        before, self._statuses[index] = self._statuses[index], status
        self._infos[index] = info if info is not None else self._infos[index]
        if self._on_status is None:
            return
        if status.state == "loading":
            self._loading(index, status)
        elif status.state in ("dead", "failed"):
            self._lost(index, status)
        elif status.state == "ready" and before.state != "ready":
            self._ready(self._on_status)

    def _loading(self, index: int, status: EngineStatus) -> None:
        first = next(i for i, each in enumerate(self._statuses) if each.state == "loading")
        if index == first and not self._was_ready and self._on_status is not None:
            self._on_status(status, None)

    def _lost(self, index: int, status: EngineStatus) -> None:
        assert self._on_status is not None
        if all(each.state == "failed" for each in self._statuses):
            self._on_status(status, None)
            return
        more = "; the other engines keep running" if status.state == "failed" else ""
        named = replace(status, state="dead", message=f"engine {index}: {status.message}{more}")
        self._on_status(named, None)
        if status.state == "failed" and not self._was_ready:
            self._ready(self._on_status)

    def _ready(self, on_status: Callable[[EngineStatus, EngineInfo | None], None]) -> None:
        serving = [i for i, each in enumerate(self._statuses) if each.state != "failed"]
        infos = [info for i in serving if (info := self._infos[i]) is not None]
        if infos and all(self._statuses[i].state == "ready" for i in serving):
            self._was_ready = True
            on_status(EngineStatus("ready"), merge_info(infos))
