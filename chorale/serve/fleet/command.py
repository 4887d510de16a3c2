"""``chorale serve --data-parallel-backend ray``: deploys the application, and deletes it when stopped."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from chorale.config.options.settings import Settings
from chorale.errors import ConfigError
from chorale.serve.bootstrap import EXIT_FAILED, EXIT_OK
from chorale.serve.fleet import version
from chorale.serve.fleet.application import application, resources_of

APPLICATION = "chorale"
START = "start one with 'ray start --head', or name one in RAY_ADDRESS"
POLL = 1.0  # seconds between two checks of the application's state


def run(settings: Settings, say: Callable[[str], None], notices: Sequence[str] = ()) -> int:
    """Serves until a signal. Returns the exit code; raises ``ConfigError``. Main thread only."""
    serve = version.import_serve()
    warning = version.check(version.installed())
    for line in [*notices, *([warning] if warning else [])]:
        say(f"note: {line}")
    connect()
    server = settings.server
    check_room(resources_of(settings.engine), server.data_parallel_size, nodes())
    target = application(settings)
    was_running = bool(serve.status().proxies)
    if was_running and APPLICATION in serve.status().applications:
        raise ConfigError(
            f"the application {APPLICATION!r} is already on this cluster: update it with 'serve deploy', or "
            f"delete it with 'serve delete {APPLICATION}'"
        )
    serve.start(
        proxy_location="EveryNode",
        http_options={"host": server.host, "port": server.port, "root_path": server.root_path},
    )
    if was_running:
        say("note: Ray Serve was already running: its proxies keep their address and port")
    stop = Stop()
    say(f"deploying on Ray: {server.data_parallel_size} engines; 'serve status' shows the progress")
    try:
        with stop.caught():
            return _watch(serve, target, stop, say, f"http://{server.host}:{server.port}")
    finally:
        say("stopping: replicas finish running requests")
        with contextlib.suppress(KeyboardInterrupt):
            serve.delete(APPLICATION)
        if not was_running:
            serve.shutdown()


def _watch(serve: Any, target: Any, stop: Stop, say: Callable[[str], None], url: str) -> int:
    """Reports the state of the application until a signal arrives or the application ends."""
    serve._run(target, name=APPLICATION, route_prefix="/", _blocking=False)
    last = ""
    while not stop.asked.wait(POLL):
        found = serve.status().applications.get(APPLICATION)
        state = found.status.name if found is not None else "DELETED"
        if state != last:
            last = state
            say(f"ready at {url} (a proxy on every node)" if state == "RUNNING" else f"{state.lower()}")
        if found is None:
            return EXIT_FAILED
        if state == "DEPLOY_FAILED":
            say(found.message)
            return EXIT_FAILED
    return EXIT_OK


class Stop:
    """Handles stop signals: the first starts the drain, the second ends this process at once."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signal(self, number: int, frame: object) -> None:
        if self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()


def connect() -> None:
    """Connects to the cluster at ``RAY_ADDRESS`` or on this machine. Raises ``ConfigError``."""
    import ray

    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(
            address=address, log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True
        )
    except ConnectionError:
        where = "on this machine" if address == "auto" else f"at RAY_ADDRESS={address}"
        raise ConfigError(f"--data-parallel-backend ray: there is no Ray cluster {where}: {START}") from None
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"--data-parallel-backend ray: {str(error).splitlines()[0]}") from error


def nodes() -> list[Mapping[str, Any]]:
    """Returns the live nodes of the cluster."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def check_room(resources: Mapping[str, float], count: int, found: Sequence[Mapping[str, Any]]) -> None:
    """Raises ``ConfigError`` if the nodes have too few resources for ``count`` engines."""
    kind = next((name for name in resources if name != "CPU"), "CPU")
    each = resources[kind]
    have = [math.floor(node["Resources"].get(kind, 0)) for node in found]
    room = sum(math.floor(amount / each) for amount in have)
    if room >= count:
        return
    unit = "CPUs" if kind == "CPU" else f"{kind}s"
    listed = ", ".join(
        f"{node['NodeManagerAddress']} {amount}" for node, amount in zip(found, have, strict=True)
    )
    group = f", {each:g} per engine on one node" if each > 1 else ""
    remedy = (
        f"use --data-parallel-size {room}" if room else "use a smaller --tensor-parallel-size, or add nodes"
    )
    what = "1 engine needs" if count == 1 else f"{count} engines need"
    raise ConfigError(
        f"--data-parallel-size {count}: {what} {count * each:g} {unit}{group}; the cluster has "
        f"{sum(have)} ({listed}): {remedy}"
    )
