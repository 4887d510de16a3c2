"""The exception of the tools. Its message is written for the model, which reads it and continues."""

from __future__ import annotations


class ToolError(Exception):
    """A call that failed. Never leaves ``ToolBox.call``."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
