"""TurnTools: the opened built-in tools of one choice. ``ToolUse`` counts their calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from chorale.tools.contract import McpListing, ToolBox


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """An earlier turn's call that the user approved. ``token_ids``: its message."""

    request_id: str
    recipient: str
    name: str
    server_label: str
    arguments: str
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class TurnTools:
    """``on_called`` is called after each call with the kind of the tool and whether the call failed.

    ``cites``: citation marks become links; ``listings``: shown as items before anything else.
    """

    box: ToolBox
    session_key: str
    max_calls: int | None = None
    cites: bool = True
    listings: tuple[McpListing, ...] = ()
    on_called: Callable[[str, bool], None] | None = None
    _closed: bool = field(default=False, init=False)

    async def aclose(self) -> None:
        """Closes the box. Idempotent: both the turn and a caller that drops it may close it."""
        if not self._closed:
            self._closed = True
            await self.box.aclose()
