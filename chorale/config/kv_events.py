"""KvEventsConfig: where KV events are published and how.

Names and defaults are those of vLLM's ``--kv-events-config``; ``bind``, ``encoding`` and ``groups`` are
Chorale's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

Encoding = Literal["map", "array"]
Groups = Literal["full", "all"]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
_TCP = re.compile(r"tcp://(?P<host>\*|\[[^\]]+\]|[^\s/]+):(?P<port>\d{1,5})")
_MOST_PATH = 100  # bytes of a unix socket's path, including the suffix of a replica


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """The operator's choice. ``read_objects.read_kv_events`` checks the values."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"  # address of replica 0; replica r adds r to the port
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000  # batches kept for replay
    hwm: Count = 100_000  # batches that may wait for one slow subscriber
    max_queue_size: Count = 100_000  # batches that may wait for the publisher
    topic: str = ""
    bind: bool | None = None  # False: connect to a subscriber that listens; None: as the address implies
    encoding: Encoding = "map"  # "array": vLLM's format before 0.26
    groups: Groups = "full"  # "all": sliding-window layers too

    @property
    def is_on(self) -> bool:
        """Returns whether events are recorded and published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def why_silent(self, has_prefix_cache: bool) -> str:
        """Returns why nothing is published; "" if events are."""
        if not self.enable_kv_cache_events:
            return "enable_kv_cache_events is not true"
        if self.publisher == "null":
            return 'the publisher is "null"'
        return "" if has_prefix_cache else "prefix caching is off"


def endpoint_of(endpoint: str, replica: int, name: str = "endpoint") -> str:
    """Returns the address of one replica: a TCP port is ``replica`` higher, a path has a suffix, as in vLLM.

    Raises ``ValueError`` for an address that cannot work.
    """
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://") + (f"_dp{replica}" if replica else "")
        if path in ("", "*") or len(path.encode()) > _MOST_PATH:
            raise ValueError(f"{name} {endpoint!r}: must have a path of at most {_MOST_PATH} bytes")
        return f"ipc://{path}"
    found = _TCP.fullmatch(endpoint)
    if found is None:
        raise ValueError(f"{name} {endpoint!r}: must be tcp://HOST:PORT (such as tcp://*:5557) or ipc://PATH")
    port = int(found["port"]) + replica
    if not 1 <= port <= 65535:
        raise ValueError(f"{name} {endpoint!r}: port {port} is not in the range 1 to 65535")
    host = found["host"]
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"  # tcp://:::5557
    return f"tcp://{host}:{port}"
