"""For the matrix: our MCP servers, each once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port


@pytest.fixture(scope="session")
def mcp_servers(python_sandbox: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """``chorale tools serve browser`` and ``... python``, as other engines use them: host:port of each."""
    folder = tmp_path_factory.mktemp("mcp")
    processes, addresses = [], []
    for name, options in (("browser", ["--browser-tool", "offline"]), ("python", [])):
        port = free_port()
        command = [sys.executable, "-m", "chorale", "tools", "serve", name, "--port", str(port), *options]
        log = (folder / f"{name}.log").open("w")
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        addresses.append(f"127.0.0.1:{port}")
        log.close()
    try:
        for process, address in zip(processes, addresses, strict=True):
            _wait(process, address, folder)
        yield tuple(addresses)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(10)


def _wait(process: subprocess.Popen[bytes], address: str, folder: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        logs = [path.read_text() for path in folder.iterdir()]
        assert process.poll() is None, logs
        try:
            with urllib.request.urlopen(f"http://{address}/health", timeout=2):
                return
        except OSError:
            assert time.monotonic() < deadline, logs
            time.sleep(0.05)
