"""Opens the sockets of the KV event publisher, with clear errors for addresses that cannot be used."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket

import zmq

from chorale.config.kv_events import KvEventsConfig, endpoint_of
from chorale.errors import ConfigError

_HOST = re.compile(r"tcp://\[?(?P<host>.*?)\]?:(?P<port>\d+)")
_ANY = ("*", "0.0.0.0", "::")
_LINGER_MS = 200  # time to send the last batch when the socket is closed
_LEAST_QUEUE = 10_000  # queued messages per replay client, enough for a snapshot of 2.5 million blocks
_MAX_REQUEST = 1024  # bytes of a message from a subscriber
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EINVAL)


def open_publisher(
    context: zmq.Context[zmq.Socket[bytes]], config: KvEventsConfig, replica: int
) -> zmq.Socket[bytes]:
    """Returns the publishing socket. It is an XPUB socket, since it also reads subscriptions.

    Raises ``ConfigError`` if the address is taken or cannot be used.
    """
    endpoint = endpoint_of(config.endpoint, replica)
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.XPUB_VERBOSE, 1)  # report every subscription, not only the first to a topic
    publisher.setsockopt(zmq.SNDHWM, config.hwm)
    _settle(publisher, endpoint)
    if is_bound(endpoint, config.bind):
        _bind(publisher, endpoint, "endpoint", '; "bind": false connects to a subscriber that listens there')
    else:
        publisher.connect(endpoint)
    return publisher


def open_replay(
    context: zmq.Context[zmq.Socket[bytes]], config: KvEventsConfig, replica: int
) -> zmq.Socket[bytes] | None:
    """Returns the socket for replays, or None if they are off. Raises as ``open_publisher``."""
    if config.replay_endpoint is None:
        return None
    endpoint = endpoint_of(config.replay_endpoint, replica)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a full or vanished client raises
    router.setsockopt(zmq.SNDHWM, max(config.buffer_steps + 1, _LEAST_QUEUE))  # room for a whole replay
    _settle(router, endpoint)
    _bind(router, endpoint, "replay_endpoint", "")
    return router


def is_bound(endpoint: str, wanted: bool | None = None) -> bool:
    """Returns whether the publisher listens on this address rather than connecting to it.

    ``wanted`` decides if it is not None. By default the publisher listens on paths, wildcards, and interfaces
    and addresses of this machine.
    """
    found = _HOST.fullmatch(endpoint)
    if wanted is not None or found is None:
        return wanted is not False
    host = found["host"]
    return host in _ANY or host in _interfaces() or _is_here(host)


def _interfaces() -> set[str]:
    with contextlib.suppress(OSError):
        return {name for _, name in socket.if_nameindex()}
    return set()


def _is_here(host: str) -> bool:
    """Returns whether a name or an address belongs to this machine."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _settle(opened: zmq.Socket[bytes], endpoint: str) -> None:
    opened.setsockopt(zmq.LINGER, _LINGER_MS)
    opened.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST)
    if endpoint.startswith("tcp://*:") or "[" in endpoint:
        opened.setsockopt(zmq.IPV6, 1)  # "*" listens for IPv4 as well


def _bind(opened: zmq.Socket[bytes], endpoint: str, name: str, hint: str) -> None:
    """Binds a socket. Raises ``ConfigError``, after closing it, if the address cannot be bound."""
    try:
        _check_free(endpoint)
        try:
            opened.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno not in _NO_IPV6 or not endpoint.startswith("tcp://*:"):
                raise
            opened.setsockopt(zmq.IPV6, 0)
            opened.bind(endpoint)
    except (OSError, zmq.ZMQError) as error:
        opened.close(0)
        taken = error.errno == errno.EADDRINUSE
        reason = f"the address is in use{hint}" if taken else error.strerror or str(error)
        raise ConfigError(f"--kv-events-config: cannot listen on {name} {endpoint}: {reason}") from None


def _check_free(endpoint: str) -> None:
    """Raises ``OSError`` if another process listens on this path, since libzmq would replace its socket."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@") or not os.path.exists(path):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return  # a killed process has left this file
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
