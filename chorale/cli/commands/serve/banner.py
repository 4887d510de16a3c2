"""The output of ``chorale serve``: a live table during start-up, then a short banner; plain lines without a
terminal.

``Screen`` receives every status change from the supervisor's event loop, so its methods must not block. It
records the phases with their durations and never stores an API key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from socket import socket
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from chorale.cli.error import print_error
from chorale.client.base import EngineInfo, EngineStatus
from chorale.config.options.settings import OPEN_ADDRESSES, Settings
from chorale.runtime.sizing.memory import gib
from chorale.serve.supervisor import Observer
from chorale.version import __version__

logger = logging.getLogger(__name__)

PHASES = {
    "download": "get the model",
    "device": "open the GPU or CPU",
    "load": "load weights",
    "compile": "compile kernels",
    "kv_pool": "allocate the KV cache",
    "warm_up": "warm up",
    "graphs": "capture CUDA graphs",
}


EXCHANGES = {
    "peers": "ranks sum their partial results in Chorale's kernels, over each other's memory",
    "nccl": "ranks sum their partial results through NCCL",
    "rccl": "ranks sum their partial results through RCCL",
    "hccl": "ranks sum their partial results through HCCL",
    "gloo": "ranks sum their partial results on the CPU (gloo)",
}


@dataclass(slots=True)
class Phase:
    name: str
    started: float
    seconds: float | None = None
    message: str = ""
    progress: float | None = None
    shown: float = 0.0  # when a line about it was printed, if there is no terminal


class Screen(Observer):
    """The terminal output of one server run."""

    def __init__(self, settings: Settings, output: TextIO, tools: tuple[str, ...] = ()) -> None:
        self._settings = settings
        self._tools = tools
        self._console = Console(file=output, highlight=False, soft_wrap=True)
        self._logs = settings.server.log_format == "json"  # every line must be a log record
        self._live: Live | None = None
        self._phases: dict[str, Phase] = {}
        self._started = time.perf_counter()
        self._ready_once = False
        self._failed = False
        self._port = settings.server.port
        self._notices: list[str] = []

    def notice(self, text: str) -> None:
        """Queues a line to print once the server listens, so that a failed start prints only its error."""
        self._notices.append(text)

    @property
    def _is_terminal(self) -> bool:
        return self._console.is_terminal and not self._logs

    def _say(self, line: str) -> None:
        if not self._logs:
            self._console.print(line, markup=False)
        elif line:
            logger.info("%s", line)

    # ------------------------------------------------------------------ Observer

    def on_listening(self, sockets: list[socket]) -> None:
        if self._port == 0 and self._settings.server.uds is None:
            self._port = sockets[0].getsockname()[1]  # the port that the system chose for port 0
        self._say(f"chorale {__version__}: {self._settings.engine.model}")
        for text in self._notices:
            self._say(f"note: {text}")
        self._say(f"listening at {self._url()} (/health is 503 until the model is ready)")

    def on_status(self, status: EngineStatus, info: EngineInfo | None) -> None:
        if status.state == "loading":
            self._loading(status)
        elif status.state == "ready" and info is not None:
            self._ready(info)
        elif status.state in ("dead", "failed"):
            self._end_live()
            self._failed = status.state == "failed"
            if self._failed:
                if self._logs:
                    logger.critical("%s", status.message)
                else:
                    print_error(status.message)
            else:
                several = self._settings.server.data_parallel_size > 1
                said = status.message if several else f"the engine died and is restarting: {status.message}"
                self._say(said)

    def on_stopping(self) -> None:
        self._end_live()
        if self._failed:
            return  # an error message has been printed already
        self._say("stopping; running requests may finish (press Ctrl-C again to cancel them)")

    # ------------------------------------------------------------------ loading

    def _loading(self, status: EngineStatus) -> None:
        if not status.phase:
            return
        now = time.perf_counter()
        phase = self._phases.get(status.phase)
        if phase is None:
            self._finish_phase(now)
            phase = self._phases[status.phase] = Phase(status.phase, now)
        phase.progress = status.progress
        phase.message = status.message or phase.message
        if not self._is_terminal:
            self._show_progress(phase, now)
        else:
            if self._live is None:
                self._live = Live(console=self._console, refresh_per_second=8, get_renderable=self._table)
                self._live.start()
            self._live.refresh()

    def _show_progress(self, phase: Phase, now: float) -> None:
        """Prints what a phase is doing, at most every 15 s; its end is always printed."""
        if phase.message and phase.seconds is None and now - phase.shown >= 15:
            phase.shown = now
            share = f"{phase.progress:.0%}, " if phase.progress else ""
            self._say(f"{_label(phase.name)}: {share}{phase.message} ...")

    def _finish_phase(self, now: float) -> None:
        for phase in self._phases.values():
            if phase.seconds is None:
                phase.seconds = now - phase.started
                if not self._is_terminal:
                    self._say(f"{_label(phase.name)}: {phase.seconds:.1f} s {phase.message}".rstrip())

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        for phase in self._phases.values():
            done = phase.seconds is not None
            seconds = phase.seconds if phase.seconds is not None else time.perf_counter() - phase.started
            share = "" if done or phase.progress is None else f"{phase.progress:.0%}"
            table.add_row("✓" if done else "…", _label(phase.name), f"{seconds:5.1f} s", share, phase.message)
        return table

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ------------------------------------------------------------------ ready

    def _ready(self, info: EngineInfo) -> None:
        self._finish_phase(time.perf_counter())
        self._end_live()
        self._phases = {}
        if self._ready_once:
            several = self._settings.server.data_parallel_size > 1
            self._say("every engine is ready again" if several else "the engine is ready again")
            return
        self._ready_once = True
        for line in self._banner(info, time.perf_counter() - self._started):
            self._say(line)
        self._say("Application startup complete.")  # guides and scripts for vLLM wait for this line

    def _banner(self, info: EngineInfo, seconds: float) -> Iterable[str]:
        """Returns the lines for a server that is ready for the first time."""
        return banner(self._settings, info, self._url(), seconds, self._tools)

    def _url(self) -> str:
        server = self._settings.server
        if server.uds is not None:
            return f"unix:{server.uds}"
        scheme = "https" if server.ssl_certfile else "http"
        host = "localhost" if server.host in ("127.0.0.1", *OPEN_ADDRESSES) else server.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._port}"


def _label(name: str) -> str:
    return PHASES.get(name, name.replace("_", " "))


def banner(
    settings: Settings, info: EngineInfo, url: str, seconds: float, tools: tuple[str, ...] = ()
) -> Iterable[str]:
    """Yields about a dozen lines: model, device, capacity, addresses, keys, tools and warnings."""
    names = settings.server.served_model_names or (settings.engine.model,)
    revision = f" at {info.revision}" if info.revision else ""
    full = info.num_kv_tokens / max(info.max_model_len, 1)
    yield ""
    yield f"model     {', '.join(names)}{revision} ({info.parameters / 1e6:,.0f} M parameters, {info.dtype})"
    replicas, ranks = settings.server.data_parallel_size, info.tensor_parallel_size
    each = f" (each of {replicas} engines)" if replicas > 1 else ""
    of_ranks = f"{ranks} ranks, each: " if ranks > 1 else ""
    yield f"device    {of_ranks}{info.device}; kernels: {_kernels(info.ops)}{each}"
    if ranks > 1:
        of_rank = ", ".join(
            f"{gib(max(sizes))} of {name.replace('_', ' ')}" for name, sizes in info.rank_bytes.items()
        )
        yield f"memory    at most {of_rank} in each rank"
        if info.exchange:
            links = f"; links: {info.rank_links}" if info.rank_links else ""
            yield f"exchange  {EXCHANGES.get(info.exchange, info.exchange)}{links}"
    longest = f"{info.max_model_len:,} tokens"
    pool = f"{info.num_kv_tokens:,} tokens in {info.kv_cache_dtype}"
    each = " per engine" if replicas > 1 else ""
    yield f"KV cache  {pool}, enough for {full:.1f} requests{each} of the maximum {longest}"
    if info.num_host_pages:
        host = f"{gib(info.host_kv_bytes)} of host memory: {info.num_host_pages:,} pages"
        yield f"          evicted pages go to {host} of {info.block_size} tokens"
    if info.speculation:
        yield f"drafts    {info.speculation}"
    if replicas > 1:
        count = settings.server.api_server_count
        processes = "1 HTTP process" if count == 1 else f"{count} HTTP processes"
        yield (
            f"engines   {replicas} behind one port, {processes}; a request goes to the engine that has its "
            "prefix in the cache, unless that engine is busy"
        )
    docs = "" if settings.server.disable_docs else f"    docs {url}/docs"
    yield f"API       {url}/v1    metrics {url}/metrics{docs}"
    if settings.server.uds is None:
        yield f"page      {url}/ (chat and charts)"
    keys = len(settings.api_keys)
    yield f"auth      {'1 API key' if keys == 1 else f'{keys} API keys' if keys else 'no API key'}"
    yield (
        "tools     functions that clients run, MCP servers named in a request"
        if (settings.server.tools.mcp_requests)
        else "tools     functions that clients run"
    )
    for line in tools:
        yield f"          {line}"
    if settings.engine.model == "demo":
        from chorale.model.demo import DEMO_NOTICE

        yield f"warning   {DEMO_NOTICE}"
        yield "          for a real model: chorale serve gpt-oss-20b"
    if info.notes:
        yield f"warning   {'; '.join(info.notes)}"
    open_page = f"Open {url}/ in a browser, or try:" if settings.server.uds is None else "Try:"
    yield f"ready in {seconds:.1f} s. {open_page}"
    yield "  " + curl(settings, url, names[0])


def _kernels(ops: str) -> str:
    """Returns the name of the operations in words: "cpu (avx512_vnni, exact)" is "AVX-512 VNNI, exact"."""
    if not ops.startswith("cpu ("):
        return {"triton": "Triton", "reference": "PyTorch"}.get(ops, ops)
    isa, _, precision = ops[len("cpu (") : -1].partition(", ")
    return f"{isa.upper().replace('AVX512', 'AVX-512').replace('_', ' ')}, {precision}"


def curl(settings: Settings, url: str, model: str) -> str:
    """Returns a curl command to paste into another terminal."""
    target = f"--unix-socket {settings.server.uds} http://localhost" if settings.server.uds else url
    key = ' -H "Authorization: Bearer $CHORALE_API_KEY"' if settings.api_keys else ""
    body = f'{{"model":"{model}","messages":[{{"role":"user","content":"What is 17 + 25?"}}]}}'
    return f"curl {target}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
