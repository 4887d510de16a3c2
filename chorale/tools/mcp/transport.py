"""Transports to an MCP server: streamable HTTP, the older SSE transport, or the pipes of a program.

A transport sends a request, passes notifications to ``on_note``, and returns the response. Callers set
deadlines (``asyncio.timeout``); transports limit sizes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import httpx2

from chorale.tools.errors import ToolError
from chorale.tools.mcp.events import EventReader
from chorale.tools.mcp.wire import (
    MAX_MESSAGE_BYTES,
    METHOD_NOT_FOUND,
    McpError,
    Message,
    decode,
    encode,
    failure,
    is_response,
    notification,
    success,
)
from chorale.tools.net.addresses import AddressPolicy
from chorale.tools.net.transport import AddressRefused, FilteringTransport
from chorale.tools.net.urls import join_url, parse_url
from chorale.tools.processes import end_process
from chorale.tracing.context import outgoing_headers

OnNote = Callable[[Message], None]
_ACCEPT = "application/json, text/event-stream"
_MAX_REDIRECTS = 3
_IDLE_SECONDS = 300.0  # between two chunks; calls have shorter deadlines


class Transport(Protocol):
    async def request(self, message: Message, on_note: OnNote) -> Message:
        """Sends a request and returns its response. Raises ``McpError``."""
        ...

    async def notify(self, message: Message) -> None: ...

    def agreed(self, version: str) -> None:
        """Sets the agreed revision after ``initialize``; some transports send it with each message."""
        ...

    async def aclose(self) -> None: ...


class NotThisTransport(McpError):
    """The address does not support this transport; another one may be tried."""


def http_client(headers: Mapping[str, str], policy: AddressPolicy) -> httpx2.AsyncClient:
    encoded = {name.encode("ascii"): value.encode("latin-1") for name, value in headers.items()}
    return httpx2.AsyncClient(
        transport=FilteringTransport(policy, max_connections=8),
        headers={b"accept-encoding": b"identity"} | encoded,
        timeout=httpx2.Timeout(10.0, read=_IDLE_SECONDS),
        follow_redirects=False,
        trust_env=False,
    )


@contextlib.asynccontextmanager
async def _sent(client: httpx2.AsyncClient, request: httpx2.Request) -> Any:
    """Sends a request and yields the response.

    Network errors become ``McpError`` without internal details.
    """
    try:
        response = await client.send(request, stream=True)
    except AddressRefused as error:
        raise McpError(
            f"{error}: the MCP server is not contacted (chorale serve --tool-allow-private-hosts allows it)"
        ) from None
    except httpx2.TimeoutException:
        raise McpError(f"{request.url.host} did not answer in time") from None
    except httpx2.HTTPError as error:
        raise McpError(f"{request.url.host} could not be reached ({type(error).__name__})") from None
    try:
        yield response
    except httpx2.TimeoutException:
        raise McpError(f"{request.url.host} stopped answering") from None
    except httpx2.HTTPError as error:
        raise McpError(f"the connection to {request.url.host} broke ({type(error).__name__})") from None
    finally:
        with contextlib.suppress(httpx2.HTTPError):
            await response.aclose()


class StreamableHttp:
    """Streamable HTTP, revision 2025-03-26 and later: each message is a POST to one address."""

    def __init__(self, client: httpx2.AsyncClient, url: str) -> None:
        self._client = client
        self._url = parse_url(url)
        self._session: str | None = None
        self._version: str | None = None

    def agreed(self, version: str) -> None:
        self._version = version

    async def request(self, message: Message, on_note: OnNote) -> Message:
        async with self._post(message) as response:
            if response.status_code == 404 and self._session is not None:
                raise McpError("the server has ended this session")
            if response.status_code in (400, 404, 405, 406, 415) and message["method"] == "initialize":
                raise NotThisTransport(f"the server answered with status {response.status_code}")
            self._session = response.headers.get("mcp-session-id", self._session)
            if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
                return await self._stream(response, message["id"], on_note)
            body = await _bounded(response)
            if not 200 <= response.status_code < 300 and not body.lstrip().startswith(b"{"):
                raise McpError(f"the server answered with status {response.status_code}")
            return _matching(decode(body), message["id"], on_note)

    async def notify(self, message: Message) -> None:
        async with self._post(message) as response:
            if response.status_code >= 400:
                raise McpError(f"the server answered with status {response.status_code}")

    async def _stream(self, response: httpx2.Response, number: int, on_note: OnNote) -> Message:
        async with contextlib.aclosing(EventReader().read(response.aiter_raw())) as events:
            async for event in events:
                for message in decode(event.data):
                    if is_response(message) and message.get("id") == number:
                        return message
                    await self._answer(message, on_note)
        raise McpError("the server ended the stream without an answer")

    async def _answer(self, message: Message, on_note: OnNote) -> None:
        reply = reply_to(message)
        if reply is not None:
            await self.notify(reply)
        elif "method" in message:
            on_note(message)

    @contextlib.asynccontextmanager
    async def _post(self, message: Message) -> Any:
        """Sends a POST and follows at most three redirects to the same host."""
        for _ in range(_MAX_REDIRECTS + 1):
            request = self._client.build_request(
                "POST", self._url, content=encode(message), headers=self._headers()
            )
            async with _sent(self._client, request) as response:
                if response.status_code not in (307, 308):
                    yield response
                    return
                self._url = _same_host(self._url, response.headers.get("location", ""))
        raise McpError("the server redirects in circles")

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept": _ACCEPT}
        if self._session is not None:
            headers["mcp-session-id"] = self._session
        if self._version is not None:
            headers["mcp-protocol-version"] = self._version
        return headers | outgoing_headers()

    async def aclose(self) -> None:
        """Ends the session on the server, if it has one."""
        if self._session is not None:
            with contextlib.suppress(McpError, TimeoutError):
                async with asyncio.timeout(2):
                    request = self._client.build_request("DELETE", self._url, headers=self._headers())
                    async with _sent(self._client, request):
                        pass
        await self._client.aclose()


class Duplex:
    """A transport with one stream of incoming messages, which a task dispatches to the waiting requests.

    Subclasses send messages and call ``_received`` and ``_ended``.
    """

    def __init__(self) -> None:
        self._waiting: dict[Any, tuple[asyncio.Future[Message], OnNote]] = {}
        self._fault: McpError | None = None
        self._replies: set[asyncio.Task[None]] = set()

    async def _send(self, message: Message) -> None:
        raise NotImplementedError

    def agreed(self, version: str) -> None:
        """Does nothing: these transports do not repeat the revision."""

    async def request(self, message: Message, on_note: OnNote) -> Message:
        if self._fault is not None:
            raise self._fault
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[message["id"]] = (future, on_note)
        try:
            await self._send(message)
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(McpError, TimeoutError):
                async with asyncio.timeout(1):
                    cancelled = {"requestId": message["id"], "reason": "no longer wanted"}
                    await self._send(notification("notifications/cancelled", cancelled))
            raise
        finally:
            del self._waiting[message["id"]]

    async def notify(self, message: Message) -> None:
        if self._fault is not None:
            raise self._fault
        await self._send(message)

    def _received(self, message: Message) -> None:
        if is_response(message):
            number = message.get("id")  # may have any JSON type
            waiting = self._waiting.get(number) if isinstance(number, int) else None
            if waiting is not None and not waiting[0].done():
                waiting[0].set_result(message)
            return
        reply = reply_to(message)
        if reply is not None:
            task = asyncio.create_task(self._reply(reply))
            self._replies.add(task)
            task.add_done_callback(self._replies.discard)
        elif "method" in message:
            for _, on_note in list(self._waiting.values()):
                on_note(message)

    async def _reply(self, message: Message) -> None:
        with contextlib.suppress(McpError):
            await self._send(message)

    def _ended(self, fault: McpError) -> None:
        self._fault = self._fault or fault
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(self._fault)
                future.exception()  # retrieved, since the sender has raised the error already


class SsePair(Duplex):
    """The transport of revision 2024-11-05, used by vLLM: a GET stream announces an address for POSTs."""

    def __init__(self, client: httpx2.AsyncClient, url: str) -> None:
        super().__init__()
        self._client = client
        self._url = parse_url(url)
        self._endpoint: asyncio.Future[httpx2.URL] | None = None
        self._reader: asyncio.Task[None] | None = None

    async def _address(self) -> httpx2.URL:
        if self._endpoint is None:
            self._endpoint = asyncio.get_running_loop().create_future()
            self._reader = asyncio.create_task(self._read(self._endpoint))
        return await asyncio.shield(self._endpoint)

    async def _read(self, endpoint: asyncio.Future[httpx2.URL]) -> None:
        try:
            request = self._client.build_request("GET", self._url, headers={"accept": "text/event-stream"})
            async with _sent(self._client, request) as response:
                kind = response.headers.get("content-type", "").lower()
                if response.status_code != 200 or not kind.startswith("text/event-stream"):
                    raise NotThisTransport(f"the server answered with status {response.status_code}")
                async for event in EventReader().read(response.aiter_raw()):
                    if event.name == "endpoint" and not endpoint.done():
                        endpoint.set_result(_same_host(self._url, event.data))
                    elif event.name == "message":
                        for message in decode(event.data):
                            self._received(message)
            raise McpError("the server closed the stream")
        except McpError as fault:
            self._ended(fault)
            if not endpoint.done():
                endpoint.set_exception(fault)

    async def _send(self, message: Message) -> None:
        address = await self._address()
        headers = {"content-type": "application/json"}
        request = self._client.build_request("POST", address, content=encode(message), headers=headers)
        async with _sent(self._client, request) as response:
            if response.status_code >= 400:
                raise McpError(f"the server answered with status {response.status_code}")

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, *self._replies, return_exceptions=True)
        if self._endpoint is not None and self._endpoint.done() and not self._endpoint.cancelled():
            self._endpoint.exception()  # retrieved, since the waiting request has raised the error already
        await self._client.aclose()


class Stdio(Duplex):
    """A configured program, with one message per line.

    Its stderr is discarded, since it may contain secrets.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__()
        self._argv = tuple(argv)
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def _start(self) -> asyncio.subprocess.Process:
        if self._process is None:
            if self._fault is not None:  # closed: a late reply must not start a second program
                raise self._fault
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    env=self._environment,
                    start_new_session=True,
                    limit=MAX_MESSAGE_BYTES,
                )
            except OSError as error:
                raise McpError(f"the server's program does not start: {error.strerror}") from None
            self._reader = asyncio.create_task(self._read(self._process))
        return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                if line.strip():
                    for message in decode(line):
                        self._received(message)
            raise McpError("the server's program ended")
        except McpError as fault:
            self._ended(fault)
        except ValueError:  # a line above the limit of the stream
            self._ended(McpError(f"the server sent a message of more than {MAX_MESSAGE_BYTES} bytes"))

    async def _send(self, message: Message) -> None:
        process = await self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(encode(message) + b"\n")
            await process.stdin.drain()
        except (ConnectionError, BrokenPipeError):
            raise McpError("the server's program ended") from None

    async def aclose(self) -> None:
        self._ended(McpError("the connection to the server is closed"))
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await process.wait()
            await end_process(process)  # also ends its children
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, *self._replies, return_exceptions=True)


def reply_to(message: Message) -> Message | None:
    """Returns the reply to a server's request: pings are answered, others are refused."""
    if "id" not in message or "method" not in message:
        return None
    if message["method"] == "ping":
        return success(message["id"], {})
    return failure(message["id"], METHOD_NOT_FOUND, "method not supported by this client")


def _matching(messages: list[Message], number: int, on_note: OnNote) -> Message:
    found = None
    for message in messages:
        if is_response(message) and message.get("id") in (number, None):
            found = message
        elif "method" in message and "id" not in message:
            on_note(message)
    if found is None:
        raise McpError("the server sent a response without a request")
    return found


async def _bounded(response: httpx2.Response) -> bytes:
    parts, total = [], 0
    async for chunk in response.aiter_raw():
        total += len(chunk)
        if total > MAX_MESSAGE_BYTES:
            raise McpError(f"the server sent a message of more than {MAX_MESSAGE_BYTES} bytes")
        parts.append(chunk)
    return b"".join(parts)


def _same_host(base: httpx2.URL, location: str) -> httpx2.URL:
    """Resolves a redirect. Refuses other hosts, since the headers may contain the user's token."""
    try:
        target = join_url(base, location)
    except ToolError as fault:
        raise McpError(f"the server redirects to a bad address: {fault.message}") from None
    if (target.scheme, target.host, target.port) != (base.scheme, base.host, base.port):
        raise McpError("the server redirects to another host")
    return target
