"""An httpx2 transport that connects only to allowed addresses.

It resolves the name once, filters the addresses by the policy, and connects to one of the remaining
addresses, which prevents DNS rebinding between check and use. TLS still checks the certificate against the
name.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence

import httpcore2
import httpx2

from chorale.tools.net.addresses import AddressPolicy

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
_MAX_ADDRESSES = 4


class AddressRefused(httpx2.ConnectError):
    """The host has no allowed address."""


async def system_resolve(host: str, port: int) -> Sequence[str]:
    """Returns numeric addresses in the order of the system's resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class _JudgingBackend(httpcore2.AnyIOBackend):
    def __init__(self, policy: AddressPolicy, resolve: Resolve) -> None:
        self._policy = policy
        self._resolve = resolve

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        addresses = await self._judged(host, port, timeout)
        last: Exception | None = None
        for address in addresses[:_MAX_ADDRESSES]:
            try:
                return await super().connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                last = error
        raise last if last is not None else httpcore2.ConnectError("no address")

    async def _judged(self, host: str, port: int, timeout: float | None) -> list[str]:
        try:
            async with asyncio.timeout(timeout):
                found = await self._resolve(host, port)
        except TimeoutError:
            raise httpcore2.ConnectTimeout(f"{host} was not resolved in time") from None
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(f"{host} cannot be resolved: {error}") from None
        allowed = [address for address in dict.fromkeys(found) if self._policy.allows(address)]
        if not allowed:
            raise AddressRefused(f"{host} is not a public address")
        return allowed


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Returns the TLS context of all connections, since loading the authorities takes 20 ms."""
    return httpx2.create_ssl_context(trust_env=False)


class FilteringTransport(httpx2.AsyncHTTPTransport):
    """A transport for ``httpx2.AsyncClient``.

    Ignores proxy variables, since proxies resolve names themselves.
    """

    def __init__(
        self,
        policy: AddressPolicy,
        *,
        resolve: Resolve = system_resolve,
        max_connections: int = 64,
    ) -> None:
        # Replaces the base class's constructor, whose pool connects to any address. If its methods used a
        # pool of another name, they would fail.
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=_certificates(),
            max_connections=max_connections,
            max_keepalive_connections=16,
            keepalive_expiry=30.0,
            network_backend=_JudgingBackend(policy, resolve),
        )
