"""Headless Firefox over WebDriver BiDi, which it speaks itself."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.browsers.remote import Remote
from tests.support.browsers.tab import SIZE

PATH = next((found for name in ("firefox-esr", "firefox") if (found := shutil.which(name))), None)
_KEYS = {
    "Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "End": "\ue010", "Home": "\ue011",
    "ArrowLeft": "\ue012", "ArrowRight": "\ue014",
}  # fmt: skip
_PREFERENCES = {
    "remote.prefs.recommended": True,  # those of automated tests: no updates, no reports, no first page
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "services.settings.server": "data:,",
    "layout.css.prefers-color-scheme.content-override": 1,
    "fission.autostart": False,  # one process for all sites: no switch between a blank page and the server's
}


class Firefox(Remote):
    name = "firefox"

    def __init__(self, folder: Path) -> None:
        assert PATH is not None
        lines = (f"user_pref({json.dumps(k)}, {json.dumps(v)});" for k, v in _PREFERENCES.items())
        (folder / "user.js").write_text("\n".join(lines))
        command = [PATH, "--headless", "--no-remote", "--profile", str(folder), "--remote-debugging-port=0"]
        super().__init__(command, folder / "log", "/session")
        self.call("session.new", capabilities={})
        self._context = self.call("browsingContext.getTree")["contexts"][0]["context"]
        self.call("session.subscribe", events=["log.entryAdded"])
        self.resize(*SIZE)

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "log.entryAdded" and parameters["source"].get("realm"):
            self.console.append(str(parameters["text"]))

    def open(self, url: str) -> None:
        """Opens the page in a new tab: a navigation that ends another one sometimes never returns."""
        last, self._context = self._context, self.call("browsingContext.create", type="tab")["context"]
        self.call("browsingContext.close", context=last)
        self.resize(*self._size)
        if url != "about:blank":
            self.call("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def reload(self) -> None:
        self.call("browsingContext.reload", context=self._context, wait="complete")

    def value(self, expression: str) -> Any:
        wrapped = f"(async () => JSON.stringify(await (async () => ({expression}))()))()"
        found = self.call(
            "script.evaluate", expression=wrapped, target={"context": self._context}, awaitPromise=True
        )
        assert found["type"] == "success", found
        text = found["result"].get("value")
        return None if text is None else json.loads(text)

    def _keys(self, *keys: str) -> None:
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keyboard", "actions": steps}]
        self.call("input.performActions", context=self._context, actions=actions)

    def type(self, text: str) -> None:
        self.value(f"document.execCommand('insertText', false, {json.dumps(text)})")  # keys take long

    def press(self, key: str) -> None:
        self._keys(_KEYS[key])

    def resize(self, width: int, height: int) -> None:
        self._size = (width, height)
        size = {"width": width, "height": height}
        self.call("browsingContext.setViewport", context=self._context, viewport=size)

    def darken(self, dark: bool) -> None:
        """Skips the test if it is for dark colours."""
        if dark:
            pytest.skip("Firefox 140 has no command that switches to dark colours")

    def screenshot(self, path: Path) -> None:
        taken = self.call("browsingContext.captureScreenshot", context=self._context)
        path.write_bytes(base64.b64decode(taken["data"]))
