"""Connections to a server: one at ``--url``, or a private one on a unix socket that ends with the command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from chorale.errors import ChoraleError, ConfigError
from chorale.machine.folders import folder_for_sockets
from chorale.machine.signals import signals_as_exceptions

DEFAULT_URL = "http://localhost:8000/v1"


@dataclass(frozen=True, slots=True)
class Connection:
    """A client of an OpenAI-compatible server. ``model`` is the model name to send."""

    client: httpx2.Client
    model: str
    where: str

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Sends a POST with ``stream: true`` and yields each event.

        Raises ``ChoraleError`` with the server's message, or with the connection's error.
        """
        try:
            with self.client.stream("POST", path, json=body | {"stream": True}) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChoraleError(_error_text(response))
                for line in response.iter_lines():
                    if not line.startswith("data:") or line == "data: [DONE]":
                        continue
                    event = json.loads(line[5:])
                    if event.get("error"):
                        raise ChoraleError(str(event["error"].get("message", event["error"])))
                    yield event
        except httpx2.HTTPError as error:
            raise ChoraleError(f"no answer from {self.where} ({error})") from error


def _error_text(response: httpx2.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server responded with HTTP {response.status_code}"


@contextlib.contextmanager
def connect(
    url: str | None, model: str | None, api_key: str | None, serve_arguments: list[str]
) -> Iterator[Connection]:
    """Connects to ``url``, else to a server at the default address (without ``model``), else starts one."""
    # Stripped, since a key read from a file may end with a line end; as bytes, since it may not be ASCII.
    headers = {b"authorization": f"Bearer {api_key.strip()}".encode()} if api_key else {}
    if url is None and not serve_arguments and _answers(DEFAULT_URL):
        url = DEFAULT_URL
    if url is not None:
        url = api_url(url)
        with httpx2.Client(base_url=url, headers=headers, timeout=_timeout()) as client:
            yield Connection(client, model or _first_model(client, url), url)
        return
    with signals_as_exceptions(), private_server(serve_arguments) as socket, client_of(socket) as client:
        yield Connection(client, model or _first_model(client, "the private server"), "a private server")


def api_url(url: str, option: str = "--url") -> str:
    """Returns the base of an API's paths: ``/v1`` is added to an address without a path.

    Raises ``ConfigError`` for a URL that no request can be sent to.
    """
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"{option} {url}: {error}; give a URL such as {DEFAULT_URL}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{option} {url}: not an http:// or https:// URL; give one such as {DEFAULT_URL}")
    return url.rstrip("/") + ("/v1" if parsed.path.strip("/") == "" else "")


def _timeout() -> httpx2.Timeout:
    return httpx2.Timeout(10.0, read=600.0)


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url.removesuffix("/v1") + "/health", timeout=0.3).status_code == 200
    except httpx2.HTTPError:
        return False


def _first_model(client: httpx2.Client, where: str) -> str:
    try:
        response = client.get("/models")
    except httpx2.HTTPError as error:
        raise ConfigError(f"no server at {where} ({error}); start one with: chorale serve") from None
    if response.status_code != 200:
        raise ChoraleError(_error_text(response))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ChoraleError(f"{where} is not an OpenAI-compatible server") from None


def client_of(socket: Path) -> httpx2.Client:
    """Returns a client of a private server."""
    transport = httpx2.HTTPTransport(uds=str(socket))
    return httpx2.Client(transport=transport, base_url="http://localhost/v1", timeout=_timeout())


@dataclass(slots=True)
class PrivateProcess:
    """A server that is starting: its process, the socket it will listen on, and the file of its output."""

    process: subprocess.Popen[bytes]
    socket: Path
    log: Path


@contextlib.contextmanager
def private_process(serve_arguments: list[str]) -> Iterator[PrivateProcess]:
    """Starts ``chorale serve`` on a unix socket, without the operator's API keys. It ends with the block, and
    with this process."""
    kept = folder_for_sockets((tempfile.gettempdir(), "/tmp"), "http.sock")
    if kept is None:
        raise ConfigError("cannot create the server's socket: set TMPDIR to a short, writable path")
    with kept as folder:
        socket, log = Path(folder, "http.sock"), Path(folder, "log")
        # What it stores ends with it: the user's own store is not opened.
        store = ["--response-store", ":memory:"]
        arguments = command(["serve", *store, *serve_arguments, "--uds", str(socket)])
        environment = {k: v for k, v in os.environ.items() if k not in ("CHORALE_API_KEY", "VLLM_API_KEY")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                arguments, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        try:
            yield PrivateProcess(process, socket, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def private_server(serve_arguments: list[str]) -> Iterator[Path]:
    """Starts ``chorale serve ARGUMENTS``, waits until it is healthy and yields its socket.

    The server ends with the block.
    """
    with private_process(serve_arguments) as started:
        with client_of(started.socket) as client:
            _wait_until_healthy(client, started)
        yield started.socket


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _wait_until_healthy(client: httpx2.Client, started: PrivateProcess) -> None:
    shown = ""
    while True:
        if started.process.poll() is not None:
            raise ChoraleError(
                f"the server exited during start-up:\n{started.log.read_text('utf-8', 'replace').strip()}"
            )
        response = None
        if started.socket.exists():  # the HTTP library does not close a socket that cannot connect
            with contextlib.suppress(httpx2.HTTPError):
                response = client.get("http://localhost/health")
        if response is not None and response.status_code == 200:
            if shown:
                _show("\r" + " " * len(shown) + "\r")
            return
        if sys.stderr.isatty():
            phase = ""
            if response is not None:
                with contextlib.suppress(ValueError):
                    phase = str(response.json().get("phase", ""))
            shown = f"starting {phase} ...".replace("  ", " ").ljust(len(shown))
            _show(f"\r{shown}")
        time.sleep(0.1)


def command(arguments: Sequence[str]) -> list[str]:
    """Returns the command line that runs ``chorale ARGUMENTS`` as a child of this process."""
    return [sys.executable, "-m", "chorale.cli.bound", str(os.getpid()), *arguments]
