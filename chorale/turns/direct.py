"""Direct: sends chunks of a turn past its generators, whose waking would double the cost of a token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from chorale.engine.types import TokenChunk
from chorale.turns.events import OutputEvent

Found = str | list[OutputEvent]  # events of a choice, or just more text of its open item


@dataclass(slots=True)
class Outlet:
    """A connection to a client. ``send`` sends a chunk of a chunked body."""

    transport: asyncio.WriteTransport
    send: Callable[[asyncio.WriteTransport, bytes], None]
    is_open: bool = True  # the client is connected and reads what is sent


@dataclass(slots=True)
class Direct:
    """``outlet`` is set when the response has begun, ``decode`` and ``encode`` before it."""

    outlet: Outlet | None = None
    decode: Callable[[TokenChunk], Found | None] = field(init=False)
    encode: Callable[[Found], bytes] = field(init=False)
    fault: Exception | None = None  # ends the turn
    is_idle: bool = False  # nothing was sent since a reader of this attribute set it

    def read(self, chunk: TokenChunk) -> bool:
        """Sends the events of a chunk. Returns False if the generators must read it, which is allowed even if
        ``decode`` has read it. Catches every fault: the caller serves other streams too."""
        outlet = self.outlet
        if outlet is None or not outlet.is_open or self.fault is not None:
            return False
        try:
            found = self.decode(chunk)
            data = self.encode(found) if found else b""
        except Exception as fault:
            self.fault, found = fault, None
        if found and data:
            outlet.send(outlet.transport, data)
            self.is_idle = False
        return found is not None
