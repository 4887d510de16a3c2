"""Headless Chromium over its DevTools protocol."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

from tests.support.browsers.remote import Remote
from tests.support.browsers.tab import SIZE

PATH = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
)
# The chat page asks the server again after one or two seconds: here after a quarter of that.
_POLL_OFTEN = (
    "const later = window.setTimeout; window.setTimeout = (call, ms, ...given) =>"
    " later(call, ms === 1000 || ms === 2000 ? ms / 4 : ms, ...given);"
)

# Windows' codes, which Chromium uses on every system.
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}


class Page(Remote):
    name = "chromium"

    def __init__(self, folder: Path) -> None:
        assert PATH is not None
        super().__init__([PATH, *_OPTIONS, f"--user-data-dir={folder}"], folder / "log")
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.resize(*SIZE)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=_POLL_OFTEN)

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Runtime.consoleAPICalled":
            self.console.append(
                str([each.get("value", each.get("description")) for each in parameters["args"]])
            )
        elif event == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
        elif event == "Log.entryAdded":
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
