"""KvEventsConfig: where KV events are published and how, and the reader of the operator's JSON.

Names and defaults are those of vLLM's ``--kv-events-config``; ``bind``, ``encoding`` and ``groups`` are
Chorale's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from chorale.errors import ConfigError

Encoding = Literal["map", "array"]
Groups = Literal["full", "all"]
_TCP = re.compile(r"tcp://(?P<host>\*|\[[^\]]+\]|[^\s/]+):(?P<port>\d{1,5})")
_MOST_PATH = 100  # bytes of a unix socket's path, including the suffix of a replica


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """The operator's choice. ``read_kv_events`` checks the values."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"  # address of replica 0; replica r adds r to the port
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches kept for replay
    hwm: int = 100_000  # batches that may wait for one slow subscriber
    max_queue_size: int = 100_000  # batches that may wait for the publisher
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


_NAMES = tuple(field.name for field in fields(KvEventsConfig))
_CHOICES = {"publisher": ("zmq", "null"), "encoding": ("map", "array"), "groups": ("full", "all")}
_NUMBERS = ("buffer_steps", "hwm", "max_queue_size")


def read_kv_events(given: Any, shown: str, replicas: int = 1) -> KvEventsConfig:
    """Returns the config. ``shown``: the option's name in messages. ``replicas``: engines that publish.

    Raises ``ConfigError`` for an unknown key, naming the nearest, and for a value that cannot work.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f'{shown}: must be a JSON object, such as {{"enable_kv_cache_events": true}}')
    values = {str(name): value for name, value in given.items() if value is not None}
    try:
        for name, value in values.items():
            _check(name, value)
        config = KvEventsConfig(**values)
        _check_endpoints(config, replicas)
    except ValueError as error:
        raise ConfigError(f"{shown}: {error}") from None
    return config


def _check(name: str, value: Any) -> None:
    """Raises ``ValueError`` for a key that does not exist or a value of the wrong kind."""
    if name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, n=1)
        raise ValueError(f"unknown key {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    if name in ("enable_kv_cache_events", "bind"):
        if not isinstance(value, bool):
            raise ValueError(f"{name} {value!r}: must be true or false")
    elif name in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise ValueError(f"{name} {value!r}: must be an integer, at least 1")
    elif not isinstance(value, str):
        raise ValueError(f"{name} must be a string")
    elif name in _CHOICES and value not in _CHOICES[name]:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(_CHOICES[name])}")


def _check_endpoints(config: KvEventsConfig, replicas: int) -> None:
    """Raises ``ValueError`` for an address that is malformed, or that two sockets would share."""
    used: dict[str, str] = {}
    for name, endpoint in (("endpoint", config.endpoint), ("replay_endpoint", config.replay_endpoint)):
        if endpoint is None:
            continue
        for replica in range(replicas):
            own = endpoint_of(endpoint, replica, name)
            key = own.rpartition(":")[2] if own.startswith("tcp:") else own
            if (name != "endpoint" or config.bind is not False) and key in used:
                whose = f" of replica {replica}" if replicas > 1 else ""
                raise ValueError(f"{name} {own}{whose} is already used by {used[key]}; choose another port")
            used[key] = f"{name} (replica {replica})" if replicas > 1 else name


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
