"""Start-up time of ``chorale serve``, to healthy and to the first token, with cold or warm caches."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chorale.errors import ChoraleError
from chorale.machine.folders import Folder
from chorale.requests.openai_client import Client, Endpoint, error_text
from chorale.serve.private_server import private_process, wait_until_healthy

_PROMPT = {"prompt": "The first token", "max_tokens": 1, "temperature": 0}


def startup(
    serve_arguments: Sequence[str], *, cold: int, warm: int, timeout: float, api_keys: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns median seconds of ``cold`` (with empty caches of kernels and of the demo) and ``warm`` starts.

    ``api_keys``: the server's keys, from its arguments or the environment; never part of the result.
    The operating system caches the checkpoint in both cases: only a freshly booted machine is colder.
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
            for index, event in enumerate(("healthy", "first_token")):
                if runs:
                    found[f"{name}_{event}_seconds"] = statistics.median(run[index] for run in runs)
    return found


def _start(
    serve_arguments: Sequence[str], cache: Path, timeout: float, api_key: str | None
) -> tuple[float, float]:
    """Starts a server and stops it. Returns the seconds to healthy and to the first token."""
    hub = os.environ.get("HF_HOME") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    environment = {
        "TRITON_CACHE_DIR": f"{cache}/triton", "XDG_CACHE_HOME": str(cache),
        "HF_HOME": str(Path(hub).expanduser()),  # checkpoints are not downloaded again
    }  # fmt: skip
    begin = time.perf_counter()
    with private_process(serve_arguments, environment) as started:
        endpoint = Endpoint("http://localhost/v1", api_key, started.socket)
        with Client(endpoint) as client:
            wait_until_healthy(client, started, timeout, pause=0.02)
            healthy = time.perf_counter() - begin
            answer = client.http.post(
                endpoint.url("completions"), json=_PROMPT | {"model": client.first_model()}
            )
            if answer.status_code != 200:
                raise ChoraleError(f"the first request failed: {error_text(answer)}")
            return healthy, time.perf_counter() - begin
