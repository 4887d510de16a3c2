"""The whole server as ``chorale serve`` runs it, with the fake engine. Writes a JSON line for each event.

Arguments: a JSON object with ``behaviour``, ``engine``, ``server`` and ``limits`` (all optional).
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from dataclasses import replace

import msgspec

from chorale.client.base import EngineInfo, EngineStatus
from chorale.config.engine import ServerConfig, hash_key
from chorale.serve import supervisor
from chorale.serve.logs import LogOptions, configure_logging
from chorale.serve.watch import WatchLimits
from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import FAKE_ENGINE


def tell(**event: object) -> None:
    print(json.dumps(event), flush=True)


class Teller(supervisor.Observer):
    def on_status(self, status: EngineStatus, info: EngineInfo | None) -> None:
        tell(state=status.state, message=status.message)

    def on_listening(self, sockets: list[socket.socket]) -> None:
        tell(port=sockets[0].getsockname()[1])

    def on_stopping(self) -> None:
        tell(stopping=True)


def main() -> int:
    given = json.loads(sys.argv[1])
    server = msgspec.convert(
        {"port": 0, "response_store": ":memory:", "log_level": "error"} | given.get("server", {}),
        ServerConfig,
    )
    if server.log_format == "json":
        configure_logging(LogOptions(server.log_level, server.log_format))
    return supervisor.run(
        replace(msgspec.convert(given.get("behaviour", {}), Behaviour).encode(), **given.get("engine", {})),
        server,
        Teller(),
        api_key_hashes=[hash_key(key) for key in given.get("keys", [])],
        limits=msgspec.convert(given.get("limits", {}), WatchLimits),
        engine_command=FAKE_ENGINE,
    )


if __name__ == "__main__":
    for number in (signal.SIGHUP, signal.SIGQUIT):  # a shell's background jobs and nohup ignore them
        signal.signal(number, signal.SIG_DFL)
    sys.exit(main())
