"""Headless Chromium over its DevTools pipe, without a driver or a port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.support.browsers.tab import SIZE, Tab

PATH = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
# The chat page asks the server again after one or two seconds: here after a quarter of that.
_POLL_OFTEN = (
    "const later = window.setTimeout; window.setTimeout = (call, ms, ...given) =>"
    " later(call, ms === 1000 || ms === 2000 ? ms / 4 : ms, ...given);"
)

# Windows' codes, which Chromium uses on every system.
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}


class Page(Tab):
    name = "chromium"

    def __init__(self, folder: Path) -> None:
        assert PATH is not None
        ours, theirs = os.pipe(), os.pipe()  # (read, write): Chromium reads 3 and writes 4

        def connect() -> None:
            os.dup2(ours[0], 3)
            os.dup2(theirs[1], 4)
            os.set_inheritable(3, True)  # dup2 does nothing if it was 3 already

        self._process = subprocess.Popen(
            [PATH, *_OPTIONS, f"--user-data-dir={folder}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=connect, close_fds=False,
        )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self._write, self._read, self._rest = ours[1], theirs[0], b""
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.resize(*SIZE)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=_POLL_OFTEN)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 20
        while True:
            found = self._next(deadline)
            if found.get("id") == self._number:
                assert "error" not in found, found
                return dict(found["result"])
            self._note(found)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 2**16) if ready else b""
            assert data, "Chromium does not answer"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.console.append(
                str([each.get("value", each.get("description")) for each in parameters["args"]])
            )
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded":
            self.console.append(parameters["entry"]["text"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def reload(self) -> None:
        self.value("window.beforeReload = true")
        self.call("Page.reload")
        self.until("!window.beforeReload")

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        named = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        for kind in ("rawKeyDown", *(("char",) if key == "Enter" else ()), "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, **named, **({"text": "\r"} if kind == "char" else {})
            )

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def darken(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._write)
        os.close(self._read)
