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

PATH = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)


class Page:
    """One tab. ``console`` collects messages, errors and refusals of the content policy."""

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
        self.call(
            "Emulation.setDeviceMetricsOverride", width=1100, height=800, deviceScaleFactor=1, mobile=False
        )
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

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
            self.console.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(parameters["entry"]["text"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Returns the awaited value of JavaScript. The page's content policy does not apply to DevTools."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 15.0) -> Any:
        """Poll until the expression is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.value(f"!!({expression})")):
            assert time.monotonic() < deadline, (
                expression,
                self.value("document.body.innerText"),
                self.console,
            )
            time.sleep(0.03)
        return found

    def send(self, text: str) -> None:
        """Write a message and press Enter."""
        self.value("document.getElementById('text').focus()")
        self.call("Input.insertText", text=text)
        for kind in ("rawKeyDown", "char", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
            self.call(
                "Input.dispatchKeyEvent", type=kind, **key, **({"text": "\r"} if kind == "char" else {})
            )

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector: str) -> list[str]:
        return list(
            self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.innerText)")
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._write)
        os.close(self._read)
