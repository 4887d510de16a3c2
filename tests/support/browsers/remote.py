"""A headless browser that tests control without a driver, over a WebSocket on a port of its own choice."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from tests.support.browsers.tab import Tab

_START_SECONDS = 60.0


class Remote(Tab):
    def __init__(self, command: list[str], log: Path, path: str = "") -> None:
        """``command`` prints the WebSocket's address into ``log``; ``path`` is added to it."""
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        self.console: list[str] = []
        self._number = 0
        self._session: dict[str, str] = {}  # more members of each message
        self._socket = connect(self._address(log) + path, max_size=None)

    def _address(self, log: Path) -> str:
        deadline = time.monotonic() + _START_SECONDS
        while not (found := re.search(r" listening on (ws://\S+)\n", log.read_text("utf-8"))):
            assert time.monotonic() < deadline, log.read_text("utf-8")
            assert self._process.poll() is None, log.read_text("utf-8")
            time.sleep(0.05)
        return found[1]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        self._socket.send(json.dumps(message))
        while True:
            found = json.loads(self._socket.recv(timeout=60))
            if found.get("id") == self._number:
                assert "result" in found, found
                return dict(found["result"])
            self._note(found.get("method", ""), found.get("params", {}))

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        """Adds what an event says to ``console``."""
        raise NotImplementedError

    def close(self) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(20)
