"""A tab of a browser, as the tests of the pages use it. ``chromium`` and ``firefox`` implement it."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

SIZE = (1100, 800)


class Tab(ABC):
    """``console`` collects messages, errors and refusals of the content policy."""

    name: str
    console: list[str]

    @abstractmethod
    def open(self, url: str) -> None: ...

    @abstractmethod
    def reload(self) -> None:
        """Returns once the new page has begun."""

    @abstractmethod
    def value(self, expression: str) -> Any:
        """Returns the awaited value of JavaScript. The page's content policy does not apply to it."""

    @abstractmethod
    def type(self, text: str) -> None:
        """Writes into the focused element."""

    @abstractmethod
    def press(self, key: str) -> None:
        """Presses a key by its DOM name ("Enter", "ArrowRight", "Escape", "Tab")."""

    @abstractmethod
    def resize(self, width: int, height: int) -> None: ...

    @abstractmethod
    def darken(self, dark: bool) -> None: ...

    @abstractmethod
    def screenshot(self, path: Path) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def until(self, expression: str, seconds: float = 30.0) -> Any:
        """Polls until the expression is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.value(f"!!({expression})")):
            shown = self.value("document.body.innerText") if time.monotonic() >= deadline else ""
            assert time.monotonic() < deadline, (expression, shown, self.console)
            time.sleep(0.03)
        return found

    def send(self, text: str) -> None:
        """Writes a message and presses Enter."""
        self.value("document.getElementById('text').focus()")
        self.type(text)
        self.press("Enter")

    def run(self, statements: str) -> None:
        self.value(f"(() => {{ {statements} }})()")

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector: str) -> list[str]:
        return list(
            self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.innerText)")
        )

    def count(self, selector: str) -> int:
        return int(self.value(f"document.querySelectorAll({json.dumps(selector)}).length"))
