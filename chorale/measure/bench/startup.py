"""Start-up time of ``chorale serve``, to healthy and to the first token, with cold or warm caches."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from chorale.errors import ChoraleError
from chorale.machine.folders import Folder

_PROMPT = {"prompt": "The first token", "max_tokens": 1, "temperature": 0}


def startup(
    serve_arguments: Sequence[str], *, cold: int, warm: int, timeout: float, api_keys: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns medians over ``cold`` starts (empty caches of kernels and of the demo), then over ``warm``
    ones.

    ``api_keys``: the server's keys, from its arguments or the environment; never part of the result.
    The page cache keeps the checkpoint in both cases: only a freshly booted machine is colder.
    Raises ``ChoraleError`` if a server does not become healthy in ``timeout`` seconds.
    """
    shown = " ".join(serve_arguments)
    for key in api_keys:
        shown = shown.replace(key, "***")
    found: dict[str, Any] = {"arguments": shown}
    api_key = next(iter(api_keys), None)
    with Folder() as kept:
        for name, count in (("cold", cold), ("warm", warm)):
            runs = []
            if name == "warm" and count:
                _start(serve_arguments, kept, timeout, api_key)  # fills the caches that the warm starts use
            for _ in range(count):
                with Folder() as fresh:
                    runs.append(_start(serve_arguments, fresh if name == "cold" else kept, timeout, api_key))
            for place, what in enumerate(("healthy", "first_token")):
                if runs:
                    found[f"{name}_{what}_seconds"] = statistics.median(run[place] for run in runs)
    return found


def _start(
    serve_arguments: Sequence[str], cache: Path, timeout: float, api_key: str | None
) -> tuple[float, float]:
    """Starts a server and stops it. Returns the seconds to healthy and to the first token."""
    port = _free_port()
    arguments = ["serve", *serve_arguments, "--port", str(port)]
    command = [sys.executable, "-m", "chorale.cli.bound", str(os.getpid()), *arguments]
    hub = os.environ.get("HF_HOME") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    environment = os.environ | {
        "TRITON_CACHE_DIR": f"{cache}/triton", "XDG_CACHE_HOME": str(cache),
        "HF_HOME": str(Path(hub).expanduser()),  # checkpoints are not downloaded again
    }  # fmt: skip
    begin = time.perf_counter()
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        headers = {b"authorization": f"Bearer {api_key}".encode()} if api_key else {}
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout, headers=headers) as client:
            healthy = _wait(client, server, begin, timeout)
            model = client.get("/v1/models").json()["data"][0]["id"]
            answer = client.post("/v1/completions", json=_PROMPT | {"model": model})
            if answer.status_code != 200:
                raise ChoraleError(f"the first request failed: {json.dumps(answer.json())[:300]}")
        return healthy, time.perf_counter() - begin
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.communicate(timeout=60)


def _wait(client: httpx2.Client, server: subprocess.Popen[bytes], begin: float, timeout: float) -> float:
    while time.perf_counter() - begin < timeout:
        if server.poll() is not None:
            _, text = server.communicate()
            raise ChoraleError(f"the server exited: {text.decode('utf-8', 'replace')[-500:]}")
        try:
            if client.get("/health", timeout=2).status_code == 200:
                return time.perf_counter() - begin
        except httpx2.HTTPError:
            pass
        time.sleep(0.02)
    raise ChoraleError(f"the server was not healthy after {timeout:g} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
