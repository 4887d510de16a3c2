"""The sockets of the KV event publisher: which addresses are bound, and clear errors for the others."""

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
_LINGER_MS = 200  # for the last batch
_LEAST_QUEUE = 10_000  # messages to an asker: 2.5 million blocks of a snapshot
_MAX_REQUEST = 1024  # bytes of a message that a subscriber sends
_CANNOT = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EINVAL)  # no IPv6 here


def open_publisher(
    context: zmq.Context[zmq.Socket[bytes]], config: KvEventsConfig, replica: int
) -> zmq.Socket[bytes]:
    """Returns the socket that publishes. It also reads subscriptions, hence XPUB.

    Raises ``ConfigError`` if the address is taken or cannot be used.
    """
    endpoint = endpoint_of(config.endpoint, replica)
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.XPUB_VERBOSE, 1)  # every subscription, not only the first one to a topic
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
    """Returns the socket of replays, or None if they are off. Raises as ``open_publisher``."""
    if config.replay_endpoint is None:
        return None
    endpoint = endpoint_of(config.replay_endpoint, replica)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a full or vanished client raises
    router.setsockopt(zmq.SNDHWM, max(config.buffer_steps + 1, _LEAST_QUEUE))  # a whole replay
    _settle(router, endpoint)
    _bind(router, endpoint, "replay_endpoint", "")
    return router


def is_bound(endpoint: str, wanted: bool | None = None) -> bool:
    """Returns whether the publisher listens on this address; otherwise it connects to it.

    It listens on paths, wildcards, interfaces and addresses of this machine, unless ``wanted`` decides.
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
            if error.errno not in _CANNOT or not endpoint.startswith("tcp://*:"):
                raise
            opened.setsockopt(zmq.IPV6, 0)
            opened.bind(endpoint)
    except (OSError, zmq.ZMQError) as error:
        opened.close(0)
        taken = error.errno == errno.EADDRINUSE
        reason = f"the address is in use{hint}" if taken else error.strerror or str(error)
        raise ConfigError(f"--kv-events-config: cannot listen on {name} {endpoint}: {reason}") from None


def _check_free(endpoint: str) -> None:
    """Raises ``OSError`` if another process listens on this path, which libzmq would take from it."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@") or not os.path.exists(path):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return  # left by a process that was killed
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
