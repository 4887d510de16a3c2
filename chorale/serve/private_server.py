"""The server that a command uses: the one at ``--url``, or a private one that ends with the command."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

from chorale.errors import ChoraleError, ConfigError
from chorale.machine.folders import folder_for_sockets
from chorale.machine.processes import module_command
from chorale.machine.signals import signals_as_exceptions
from chorale.requests.openai_client import DEFAULT_URL, Client, Endpoint, api_url


@contextlib.contextmanager
def reach(
    url: str | None, api_key: str | None, serve_arguments: list[str], *, option: str = "--url"
) -> Iterator[Endpoint]:
    """Yields the server at ``url`` (the value of ``option``). Without it and ``serve_arguments``, yields that
    at the default address, once it has loaded its model; if there is none, a private server, which ends with
    the block."""
    if url is None and not serve_arguments and _answers(DEFAULT_URL):
        url = DEFAULT_URL
    if url is not None:
        yield Endpoint(api_url(url, option), api_key)
        return
    with signals_as_exceptions(), private_server(serve_arguments) as endpoint:
        yield endpoint


def _answers(url: str) -> bool:
    told = False
    while (status := _health(url, 10.0 if told else 0.3)) == 503:
        if not told:
            _show(f"waiting for the server at {url}, which is loading its model (Ctrl-C to give up) ...\n")
        told = True
        time.sleep(0.5)
    return status == 200


def _health(url: str, seconds: float) -> int | None:
    try:
        return httpx2.get(url.removesuffix("/v1") + "/health", timeout=seconds).status_code
    except httpx2.HTTPError:
        return None


@dataclass(slots=True)
class PrivateProcess:
    """A server that is starting: its process, the path of its socket, and its log file."""

    process: subprocess.Popen[bytes]
    socket: Path
    log: Path

    def output(self) -> str:
        try:
            return self.log.read_text("utf-8", "replace").strip()
        except OSError:
            return "(no log)"


@contextlib.contextmanager
def private_process(
    serve_arguments: Sequence[str], environment: Mapping[str, str] = {}
) -> Iterator[PrivateProcess]:
    """Starts ``chorale serve`` on a unix socket, without the operator's API keys. It ends with the block or
    with this process. ``environment``: additional variables for it."""
    kept = folder_for_sockets((tempfile.gettempdir(), "/tmp"), "http.sock")
    if kept is None:
        raise ConfigError("cannot create the server's socket: set TMPDIR to a short, writable path")
    with kept as folder:
        socket, log = Path(folder, "http.sock"), Path(folder, "log")
        # Responses are kept in memory only; the user's own store is not opened.
        store = ["--response-store", ":memory:"]
        arguments = command(["serve", *store, *serve_arguments, "--uds", str(socket)])
        kept_variables = {k: v for k, v in os.environ.items() if k not in ("CHORALE_API_KEY", "VLLM_API_KEY")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                arguments,
                stdout=output,
                stderr=output,
                env=kept_variables | dict(environment),
                start_new_session=True,
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
def private_server(serve_arguments: list[str]) -> Iterator[Endpoint]:
    """Starts ``chorale serve ARGUMENTS``, waits until it is healthy and yields its API.

    The server ends with the block.
    """
    with private_process(serve_arguments) as started:
        endpoint = Endpoint("http://localhost/v1", socket=started.socket)
        with Client(endpoint) as client:
            wait_until_healthy(client, started)
        yield endpoint


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _why_ended(started: PrivateProcess) -> ChoraleError:
    """Returns the server's own message if the configuration is invalid; otherwise the log."""
    _, found, message = started.output().rpartition("chorale: error: ")
    if started.process.returncode == 2 and found:
        return ConfigError(message)
    return ChoraleError(f"the server exited during start-up:\n{started.output()}")


def wait_until_healthy(
    client: Client, started: PrivateProcess, seconds: float = math.inf, pause: float = 0.1
) -> None:
    """Raises ``ChoraleError`` if the server ends, or is not healthy after ``seconds``.

    Polls every ``pause`` seconds, and shows the current phase of the start on a terminal.
    """
    shown, deadline = "", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if started.process.poll() is not None:
            raise _why_ended(started)
        response = None
        if started.socket.exists():  # httpx2 leaks the socket of a failed connection
            with contextlib.suppress(httpx2.HTTPError):
                response = client.get("/health", 5.0)
        if response is not None and response.status_code == 200:
            if shown:
                _show("\r" + " " * len(shown) + "\r")
            return
        if sys.stderr.isatty():
            phase = ""
            if response is not None:
                with contextlib.suppress(ValueError):
                    phase = str(response.json().get("phase", ""))
            shown = f"starting the model: {phase.replace('_', ' ')} ...".ljust(len(shown))
            _show(f"\r{shown}")
        time.sleep(pause)
    raise ChoraleError(f"the server was not healthy after {seconds:g} s:\n{started.output()}")


def command(arguments: Sequence[str]) -> list[str]:
    """Returns the command line that runs ``chorale ARGUMENTS`` as a child of this process."""
    return [*module_command("chorale.cli.bound"), str(os.getpid()), *arguments]
