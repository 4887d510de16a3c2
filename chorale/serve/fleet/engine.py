"""Engine: the deployment whose replicas each run one engine.

The engine is a child process, which inherits the GPUs that Ray assigned to the replica. The replica monitors
the engine and restarts it if it dies (``serve.engine_host``). If the replica dies, the kernel kills the
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from typing import Any

import ray
from ray.experimental import internal_kv

from chorale.api.telemetry.metrics import Metrics
from chorale.client.remote import RemoteClient
from chorale.config.engine import EngineConfig
from chorale.serve.bootstrap import configured_secret
from chorale.serve.fleet.engine_host import EngineHost
from chorale.serve.fleet.export import export_forever
from chorale.serve.fleet.holds import HoldServer
from chorale.serve.logs import LogOptions, configure_logging

logger = logging.getLogger(__name__)
_SECRET_KEY = b"chorale-prefix-secret"
WATCH = 0.1  # seconds between two checks of an engine that is starting


class Engine:
    """An engine replica, which Ray creates, checks, drains and destroys. Tokens do not pass through Ray."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: EngineConfig, model_name: str, log: LogOptions
    ) -> None:
        configure_logging(log, "engine-replica")
        host = ray.util.get_node_ip_address()
        secret = configured_secret(config, os.environ) or cluster_secret()
        self._host = EngineHost(config, host, prefix_secret=secret, log=log)
        self._holds = HoldServer(host, self._host.secret_key, config.heartbeat_timeout)
        self._holds.start()
        self._view = RemoteClient(self._host.local_address)
        self._view.start()
        await asyncio.to_thread(self._host.start)
        try:
            await self._ready()
        except BaseException:
            await self.__del__()
            raise
        metrics = Metrics(model_name)
        metrics.watch(self._view)
        self._exporter = asyncio.get_running_loop().create_task(
            export_forever(metrics.collect_engines, leave_out=("engine",))
        )

    async def _ready(self) -> None:
        """Waits until the engine is ready. Raises ``RuntimeError`` if it has failed."""
        while self._view.status.state != "ready":
            if self._host.failure is not None:
                raise RuntimeError(f"the engine cannot run: {self._host.failure.message}")
            await asyncio.sleep(WATCH)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Returns the addresses and the key with which fronts connect. Ray sends them to the routers."""
        address = self._host.address
        return {
            "engine": address.engine,
            "beats": address.beats,
            "public_key": address.public_key,
            "holds": self._holds.endpoint,
        }

    async def hold(self, name: str, front: str) -> None:
        """Returns when the request ``name`` of ``front`` has ended (see ``holds``)."""
        await self._holds.hold(front, name)

    async def check_health(self) -> None:
        """Raises ``RuntimeError`` if the engine will not be restarted, so that Ray replaces the replica.

        Passes while the engine is restarting, since a new replica would not be ready sooner.
        """
        failure = self._host.failure
        if failure is not None:
            raise RuntimeError(f"the engine has failed and is not restarted: {failure.message}")

    async def facts(self) -> dict[str, Any]:
        """Returns the state of the engine, for operators and tests."""
        status, stats = self._view.status, self._view.stats
        return {
            "pid": self._host.monitor.pid,
            "replica_pid": os.getpid(),
            "restarts": self._host.monitor.num_restarts,
            "state": status.state,
            "held": self._holds.num_held,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "prefix_cache_queries": stats.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits,
        }

    async def __del__(self) -> None:
        """Stops the engine. Ray calls it after draining, or if draining takes too long."""
        if not hasattr(self, "_view"):
            return
        exporter = getattr(self, "_exporter", None)
        if exporter is not None:
            exporter.cancel()
        await self._view.close()
        await asyncio.to_thread(self._host.stop)
        with contextlib.suppress(OSError, ValueError):
            self._holds.close()


def cluster_secret() -> bytes:
    """Returns the key of the prefix hashes, which all engines share, so that fronts hash each prompt once.

    It is not an argument of the deployment, since a new key at each update would restart all replicas.
    """
    internal_kv._internal_kv_put(_SECRET_KEY, secrets.token_hex(16).encode(), overwrite=False)
    return bytes.fromhex(internal_kv._internal_kv_get(_SECRET_KEY).decode())
