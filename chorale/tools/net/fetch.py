"""GET and POST with limits: addresses checked at every redirect, a deadline, a decompressed size."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import httpx2

from chorale.tools.errors import ToolError, deadline
from chorale.tools.net.addresses import AddressPolicy
from chorale.tools.net.transport import AddressRefused, FilteringTransport, Resolve, system_resolve
from chorale.tools.net.urls import in_domains, join_url, parse_url
from chorale.version import __version__

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 5
_MAX_RATIO = 50  # ratio of decompressed to received bytes, checked after the first 64 kB
_RATIO_FLOOR = 64 * 1024
USER_AGENT = f"Mozilla/5.0 (compatible; chorale/{__version__})"


@dataclass(frozen=True, slots=True)
class FetchLimits:
    seconds: float = 10.0
    max_bytes: int = 5 * 2**20


@dataclass(frozen=True, slots=True)
class Fetched:
    url: str  # after redirects
    status: int
    content_type: str  # lower case, without parameters
    charset: str | None
    body: bytes


class Fetcher:
    """An HTTP client shared by the browser and its back ends. Must be closed with ``aclose``."""

    def __init__(
        self,
        policy: AddressPolicy,
        limits: FetchLimits,
        *,
        resolve: Resolve = system_resolve,
    ) -> None:
        self.limits = limits
        self._client = httpx2.AsyncClient(
            transport=FilteringTransport(policy, resolve=resolve),
            headers={"user-agent": USER_AGENT, "accept-encoding": "gzip"},
            timeout=limits.seconds,
            follow_redirects=False,
            trust_env=False,
        )

    async def get(self, url: str, *, domains: tuple[str, ...] = ()) -> Fetched:
        """Fetches a URL with up to five redirects, each checked against ``domains``. Raises ``ToolError``."""
        target = parse_url(url)
        async with self._deadline():
            for _ in range(_MAX_REDIRECTS + 1):
                if not in_domains(target.host, domains):
                    raise ToolError(f"{target.host} is outside the allowed domains")
                request = self._client.build_request(
                    "GET", target, headers={"accept": "text/html, */*;q=0.5"}
                )
                answer = await self._send(request)
                if isinstance(answer, Fetched):
                    return answer
                target = join_url(target, answer)
        raise ToolError(f"more than {_MAX_REDIRECTS} redirects")

    async def call(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
    ) -> Fetched:
        """Sends a request to a configured service. Follows no redirects, since it may carry a key."""
        parse_url(url)
        async with self._deadline():
            request = self._client.build_request(method, url, headers=headers, params=params, json=json)
            answer = await self._send(request)
        if isinstance(answer, Fetched):
            return answer
        raise ToolError("the search service answered with a redirect")

    def _deadline(self) -> AbstractAsyncContextManager[None]:
        seconds = self.limits.seconds
        return deadline(seconds, ToolError(f"no complete answer within {seconds:g} s"))

    async def _send(self, request: httpx2.Request) -> Fetched | str:
        """Returns the response, or the location of a redirect."""
        try:
            response = await self._client.send(request, stream=True)
            try:
                location = response.headers.get("location")
                if response.status_code in _REDIRECTS and location:
                    return str(location)
                return await self._read(response)
            finally:
                await response.aclose()
        except AddressRefused as error:
            raise ToolError(f"{error}: access refused") from None
        except httpx2.TimeoutException:
            raise ToolError(f"{request.url.host} did not answer in time") from None
        except httpx2.HTTPError as error:
            why = str(error) or type(error).__name__
            raise ToolError(f"{request.url.host} could not be reached: {why}") from None

    async def _read(self, response: httpx2.Response) -> Fetched:
        kind, *parameters = response.headers.get("content-type", "").lower().split(";")
        reader = BoundedBody(response.headers.get("content-encoding", ""), self.limits.max_bytes)
        async for chunk in response.aiter_raw():
            reader.feed(chunk)
        charsets = [p.partition("=")[2].strip(" \"'") for p in parameters if p.strip().startswith("charset=")]
        return Fetched(
            url=str(response.url),
            status=response.status_code,
            content_type=kind.strip(),
            charset=charsets[0] if charsets and charsets[0] else None,
            body=reader.finish(),
        )

    async def aclose(self) -> None:
        await self._client.aclose()


class BoundedBody:
    """Collects a body and decompresses it incrementally, so that decompression bombs are stopped early."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        name = encoding.strip().lower()
        if name not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise ToolError(f"the body has an encoding that was not requested ({name[:40]!r})")
        # 32 + MAX_WBITS: gzip or zlib, detected by the header
        self._inflate = zlib.decompressobj(32 + zlib.MAX_WBITS) if name not in ("", "identity") else None
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._num_received = 0
        self._num_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Adds a chunk. Raises ``ToolError`` if the body is too large, expands too much or is invalid."""
        self._num_received += len(chunk)
        if self._inflate is None:
            self._keep(chunk)
            return
        try:
            while chunk:
                self._keep(self._inflate.decompress(chunk, self._max_bytes - self._num_bytes + 1))
                chunk = self._inflate.unconsumed_tail
        except zlib.error:
            raise ToolError("the compressed body is damaged") from None
        if self._num_bytes > max(_RATIO_FLOOR, _MAX_RATIO * self._num_received):
            raise ToolError("the compressed body expands too much")

    def _keep(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise ToolError(f"the body is larger than {self._max_bytes} bytes")
        self._parts.append(piece)

    def finish(self) -> bytes:
        return b"".join(self._parts)
