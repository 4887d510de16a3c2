"""The server's life cycle: listening, drain, forced shutdown, sockets, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import websockets

from chorale.api.app import create_app
from chorale.api.http.responses import json_response
from chorale.api.listening import bind_sockets
from chorale.config.engine import ServerConfig
from chorale.errors import ConfigError
from chorale.serve.http import server as server_module
from chorale.serve.http import tls
from chorale.serve.http.server import _Server
from chorale.serve.http.tls import check_tls
from tests.support import PATIENCE
from tests.support.event_loop import until
from tests.support.raw_http import Probe, call, close_connections, connect, read_answer
from tests.support.server import listening, make_state, probe_app, served

GET_HANG = b"POST /hang HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"


def test_the_error_names_an_unknown_host() -> None:
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid"):
        bind_sockets(ServerConfig(host="no.such.host.invalid"))


def test_localhost_binds_loopback_only() -> None:
    sockets = bind_sockets(ServerConfig(host="localhost", port=0))
    assert {bound.getsockname()[0] for bound in sockets} <= {"127.0.0.1", "::1"}
    for bound in sockets:
        bound.close()


def test_only_addresses_that_this_machine_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    inet, absent = (socket.AF_INET, socket.SOCK_STREAM, 0, ""), ("192.0.2.1", 0)  # reserved for documentation
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = [(*inet, absent), (*inet, ("127.0.0.1", 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        (bound,) = bind_sockets(ServerConfig())
        bound.close()
        found.append((*inet, taken.getsockname()))
        with pytest.raises(ConfigError, match="is in use"):
            bind_sockets(ServerConfig())


def test_a_unix_socket_is_private_and_replaced_when_stale(sockets: Path) -> None:
    path = sockets / "s"
    for _ in range(2):  # the second finds the file of the first
        bound = bind_sockets(ServerConfig(uds=str(path)))[0]
        assert os.stat(path).st_mode & 0o777 == 0o600
        bound.close()
    live = bind_sockets(ServerConfig(uds=str(path)))[0]
    with pytest.raises(ConfigError, match="another server listens"):
        bind_sockets(ServerConfig(uds=str(path)))
    live.close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        bind_sockets(ServerConfig(uds=str(path)))
    assert path.read_text() == "precious"


async def test_a_unix_socket_is_served(sockets: Path) -> None:
    path = str(sockets / "s")
    async with served(uds=path, listens=True):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /version HTTP/1.1\r\nhost: anything\r\n\r\n")
        assert (await read_answer(reader)).status == 200
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("root_path", ["/llm", "/llm/"])
async def test_paths_are_served_with_and_without_the_proxys_prefix(root_path: str) -> None:
    async with served(root_path=root_path, listens=True) as server:
        for path, status in {"/version": 200, "/llm/version": 200, "/llmx/version": 404, "/llm": 307}.items():
            assert (await call(server.port, "GET", path, headers={"host": "example.org"})).status == status, (
                path
            )
        for path in ("/v1/messages", "/llm/v1/messages"):
            answer = await call(server.port, "POST", path, [])
            assert (answer.status, answer.json["type"]) == (400, "error")  # Anthropic's form


async def test_one_of_several_processes_leaves_the_unix_socket_to_the_others(sockets: Path) -> None:
    path = str(sockets / "s")
    async with served(uds=path, api_server_count=2, listens=True):
        pass
    assert os.path.exists(path)


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """Returns the files of a new key and its certificate for localhost."""
    key, certificate = str(folder / f"{name}.key"), str(folder / f"{name}.pem")
    subject = ["-days", "1", "-subj", "/CN=localhost"]
    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject]
    made = subprocess.run([*openssl, "-keyout", key, "-out", certificate], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("no openssl to make a certificate with")
    return key, certificate


async def test_tls_serves_http_and_websockets_and_can_require_certificates(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path, "one")
    context = ssl.create_default_context(cafile=certificate)
    async with served(ssl_keyfile=key, ssl_certfile=certificate, listens=True) as server:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=context, server_hostname="localhost"
        )
        writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await read_answer(reader)).status == 200
        writer.write(b"GET /version HTTP/1.1\r\nx-big: " + b"a" * 100_000)
        assert (await asyncio.wait_for(read_answer(reader), PATIENCE)).status == 431
        writer.transport.abort()
        address = f"wss://127.0.0.1:{server.port}/v1/responses"
        async with websockets.connect(address, ssl=context, server_hostname="localhost") as connection:
            await connection.send('{"type": "response.create", "input": "Hi"}')
            assert '"response.created"' in str(await asyncio.wait_for(connection.recv(), PATIENCE))

    demanding = {"ssl_ca_certs": certificate, "ssl_cert_reqs": 2}
    async with served(ssl_keyfile=key, ssl_certfile=certificate, **demanding, listens=True) as server:
        assert not await answers(server.port, context)
        context.load_cert_chain(certificate, key)
        assert await answers(server.port, context)


async def test_only_the_given_ciphers_are_used(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path, "one")
    context = ssl.create_default_context(cafile=certificate)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    files: dict[str, Any] = {"ssl_keyfile": key, "ssl_certfile": certificate}
    async with served(**files, ssl_ciphers="ECDHE-RSA-AES256-GCM-SHA384", listens=True) as server:
        context.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
        assert not await answers(server.port, context)
        context.set_ciphers("ECDHE-RSA-AES256-GCM-SHA384")
        assert await answers(server.port, context)
    with pytest.raises(ConfigError, match="--ssl-ciphers NO-SUCH"):
        check_tls(ServerConfig(**files, ssl_ciphers="NO-SUCH"))


async def test_changed_certificates_are_used_once_key_and_certificate_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "REFRESH_SECONDS", 0.02)
    caplog.set_level(logging.INFO, tls.__name__)
    key, certificate = make_certificate(tmp_path, "one")
    new_key, new_certificate = make_certificate(tmp_path, "two")
    old = ssl.create_default_context(cafile=certificate)
    new = ssl.create_default_context(cafile=new_certificate)
    files = {"ssl_keyfile": key, "ssl_certfile": certificate}
    async with served(**files, enable_ssl_refresh=True, listens=True) as server:
        assert await answers(server.port, old)
        shutil.copy(new_certificate, certificate)
        await until(lambda: "TLS files are not used" in caplog.text, "the fault is logged")
        assert await answers(server.port, old)
        shutil.copy(new_key, key)
        await until(lambda: "TLS files are in use" in caplog.text, "the new files are in use")
        assert await answers(server.port, new)


async def answers(port: int, context: ssl.SSLContext) -> bool:
    """Returns whether a TLS request is answered: False if the server requires another certificate."""
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="localhost"
        )
    except (OSError, ssl.SSLError):
        return False
    try:
        writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        return (await read_answer(reader)).status == 200
    except (OSError, asyncio.IncompleteReadError):
        return False
    finally:
        writer.transport.abort()


# --------------------------------------------------------------------------- shutdown


async def test_drain_lets_running_requests_finish() -> None:
    release = asyncio.Event()

    async def slow(request: object) -> object:
        await release.wait()
        return json_response("done")

    async with (
        make_state(shutdown_timeout=120.0) as state,
        listening(probe_app(state, {"/slow": slow})) as server,  # type: ignore[dict-item]
    ):
        waiting = asyncio.create_task(call(server.port, "POST", "/slow"))
        await asyncio.sleep(0.1)
        server.stop()
        await asyncio.sleep(0.5)
        assert state.lifecycle.draining
        with pytest.raises(OSError, match="Connect call failed"):
            await connect(server.port)
        assert not server.task.done()
        release.set()
        assert (await asyncio.wait_for(waiting, PATIENCE)).json == "done"
        await close_connections()
        await asyncio.wait_for(server.task, PATIENCE)


def test_a_server_without_requests_ends_at_once() -> None:
    """It does not wait for its next periodic check (1 s), nor for idle keep-alive connections."""

    async def main() -> float:
        async with served(listens=True) as server:
            reader, writer = await connect(server.port)
            writer.write(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await read_answer(reader)).status == 200
            began = time.monotonic()
            server.stop()
            await asyncio.wait_for(server.task, PATIENCE)
            return time.monotonic() - began

    assert min(asyncio.run(main()) for _ in range(3)) < 0.3  # the best of three: the machine may be busy


async def test_during_the_drain_grace_ready_is_503_and_requests_are_served() -> None:
    async with make_state() as state, listening(create_app(state), drain_grace=1.0) as server:
        server.stop()
        await asyncio.sleep(0.1)
        assert (await call(server.port, "GET", "/health")).status == 200
        ready = await call(server.port, "GET", "/ready")
        assert (ready.status, ready.json["status"]) == (503, "draining")
        assert (await call(server.port, "GET", "/v1/models")).status == 200


@pytest.mark.parametrize("twice", [False, True])
async def test_requests_that_outlast_the_shutdown_timeout_are_cut(
    twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_CUT_SECONDS", 0.1)
    probe = Probe()
    timeout = 60.0 if twice else 0.3
    async with (
        make_state(shutdown_timeout=timeout) as state,
        listening(probe_app(state, {"/hang": probe.hang})) as server,
    ):
        reader, writer = await connect(server.port)
        writer.write(GET_HANG)
        await asyncio.wait_for(probe.started.wait(), PATIENCE)
        server.stop()
        if twice:
            server.stop()
        await asyncio.wait_for(server.task, PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), PATIENCE)  # the connection is closed too


class Late:
    """A connection that is opened while the server shuts down."""

    def __init__(self, connections: set[Any]) -> None:
        self._connections, self.num_asked = connections, 0
        connections.add(self)

    def shutdown(self) -> None:
        self.num_asked += 1
        asyncio.get_running_loop().call_later(0.05, self._connections.discard, self)


async def test_a_connection_opened_during_shutdown_is_shut_down_once() -> None:
    server = _Server(uvicorn.Config("none"))
    server.servers = []
    ending = asyncio.create_task(server.shutdown())
    await asyncio.sleep(0)  # the server has asked all open connections to end
    late = Late(server.server_state.connections)
    await asyncio.wait_for(ending, PATIENCE)
    assert late.num_asked == 1
    assert not server.server_state.connections
