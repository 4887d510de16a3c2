"""The one exception of the tools: its text is written for the model, which reads it and goes on."""

from __future__ import annotations


class ToolError(Exception):
    """A call that cannot be served. Never leaves ``ToolBox.call``."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
