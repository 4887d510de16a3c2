"""A scripted HTTP server on the loopback address: raw answers for the paths of a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

Handler = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]


def answer(status: str = "200 OK", body: bytes = b"", **headers: str) -> Handler:
    async def handler(writer: asyncio.StreamWriter, _head: bytes) -> None:
        lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    return handler


@contextlib.asynccontextmanager
async def serve(routes: Mapping[str, Handler]) -> AsyncIterator[int]:
    """Yields the port. A path that is not in ``routes`` is a 404."""

    open_writers: set[asyncio.StreamWriter] = set()
    answering: set[asyncio.Task[None] | None] = set()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.add(writer)
        answering.add(asyncio.current_task())
        # It is cancelled if it is still answering at the end, which asyncio before 3.12 reports as an error.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode().partition("?")[0]
            await routes.get(path, answer("404 Not Found"))(writer, head)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in open_writers:  # the client may have left in the middle of a body
            writer.transport.abort()
        await server.wait_closed()
        tasks = [task for task in answering if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
