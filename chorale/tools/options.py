"""Applies the operator's tool options at start: selects a search back end, a sandbox, and MCP servers.

"auto" and ``--tool-server demo`` use what is available. An unavailable tool is left out, with a reason for
the banner if it was requested by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from chorale.config.engine import BrowserOption, PythonOption, ToolConfig
from chorale.errors import ConfigError
from chorale.tools.browser.backends import SERVICES, HttpSearch, SearchBackend
from chorale.tools.browser.offline import load_folder
from chorale.tools.errors import ToolError
from chorale.tools.net.addresses import AddressPolicy
from chorale.tools.net.fetch import Fetcher, FetchLimits
from chorale.tools.net.urls import parse_url
from chorale.tools.python.launch import SandboxLimits
from chorale.tools.python.presence import check_program
from chorale.tools.python.proof import prove
from chorale.tools.python.sandbox import SAFE_KINDS, Sandbox, SandboxKind, SandboxMissing
from chorale.tools.python.tool import SessionPool
from chorale.tools.python.wasm import module as interpreter

logger = logging.getLogger(__name__)
SAMPLE_PAGES = Path(__file__).with_name("sample_pages")
BUILT_IN_SAMPLE = "the built-in sample"
COMPILING = "; compiling"
# vLLM's and the reference server's names for the sandbox of the demo tools.
_SEED_NAMES = {"uv": "dangerously_use_uv", "docker": "docker", "dangerously_use_uv": "dangerously_use_uv"}


@dataclass(slots=True)
class Found:
    """A line for each available tool and for each missing one."""

    available: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def choose_backend(
    config: ToolConfig, environment: Mapping[str, str], found: Found, service_fetcher: Fetcher
) -> SearchBackend | None:
    """Selects the search service. Raises ``ConfigError`` for a named service without key or address."""
    wanted = config.browser or ("auto" if "demo" in config.servers else "none")
    if wanted == "none":
        return None
    if wanted == "auto":
        wanted = _first_service(config, environment)
    if wanted == "offline":
        pages = load_folder(config.offline_pages or SAMPLE_PAGES)
        where = config.offline_pages or BUILT_IN_SAMPLE
        found.available["browser"] = f"offline, {len(pages)} pages of {where}"
        return pages
    service = SERVICES[wanted]
    key = environment.get(service.environment, "") if service.environment else ""
    if service.environment and not key:
        raise ConfigError(f"--browser-tool {wanted} requires a key in {service.environment}")
    if not (config.search_url or service.url):
        raise ConfigError(
            f"--browser-tool {wanted} requires an address: --browser-tool-url http://HOST:PORT/search"
        )
    _check_address(config.search_url)
    found.available["browser"] = f"{wanted}, pages from the web"
    return HttpSearch(service, service_fetcher, key, config.search_url)


def _check_address(url: str | None) -> None:
    try:
        if url:
            parse_url(url)
    except ToolError as fault:
        raise ConfigError(f"--browser-tool-url {url}: {fault.message}") from None


def _first_service(config: ToolConfig, environment: Mapping[str, str]) -> BrowserOption:
    """Returns SearXNG if its address is set, else the first service with a key, else the offline pages."""
    if config.search_url:
        return "searxng"
    keyed: tuple[BrowserOption, ...] = ("exa", "you", "brave", "tavily")
    found = (name for name in keyed if environment.get(SERVICES[name].environment))
    return next(found, "offline")


def fetchers(config: ToolConfig) -> tuple[Fetcher, Fetcher]:
    """Returns a fetcher for pages, with checked addresses, and one for the configured search service."""
    limits = FetchLimits(config.fetch_timeout, config.fetch_bytes)
    pages = Fetcher(AddressPolicy(allow_private=config.allow_private_hosts), limits)
    return pages, Fetcher(AddressPolicy(allow_private=True), limits)


async def choose_sandbox(
    config: ToolConfig, environment: Mapping[str, str], found: Found, *, patient: bool = False
) -> SessionPool | None:
    """Selects the first sandbox that passes its self-test.

    The WebAssembly interpreter is compiled on first use, which takes seconds. Unless ``patient``, compilation
    and self-test then run in the background, at low priority until the first call waits for them, and a
    message about missing sandboxes is short.
    """
    wanted = _wanted_sandbox(config, environment)
    if wanted == "none":
        return None
    reasons = []
    kinds: tuple[SandboxKind, ...] = SAFE_KINDS if wanted == "auto" else (wanted,)
    for kind in kinds:
        sandbox = Sandbox(kind, _limits(config), config.python_image)
        try:
            await check_program(sandbox)
            compiles = kind == "wasm" and not interpreter.is_compiled()
            later = compiles and not patient
            if compiles and patient:
                logger.warning("python: compiling the WebAssembly interpreter, once after its installation")
                interpreter.hurry()
            if not later:
                await prove(sandbox)
        except (SandboxMissing, OSError) as error:
            reasons.append(str(error))
        else:
            found.available["python"] = sandbox.describe + (COMPILING if later else "")
            first = prove(sandbox) if later else None
            return SessionPool(sandbox, max_sessions=config.python_sessions, first=first)
    found.missing["python"] = "; ".join(reasons)
    if wanted == "auto":
        why = "; ".join(reasons) if patient else "chorale tools check says why"
        found.missing["python"] = f"no sandbox works here; to add one: {interpreter.REMEDY} ({why})"
    return None


def _wanted_sandbox(config: ToolConfig, environment: Mapping[str, str]) -> PythonOption:
    if config.python is not None:
        return config.python
    if "demo" not in config.servers:
        return "none"
    named = environment.get("PYTHON_EXECUTION_BACKEND", "").strip().lower()
    if not named:
        return "auto"
    if named == "dangerously_use_local_jupyter":
        raise ConfigError(
            "PYTHON_EXECUTION_BACKEND=dangerously_use_local_jupyter is not offered: one kernel would be "
            "shared by all users (use docker, bubblewrap or dangerously_use_uv)"
        )
    name = _SEED_NAMES.get(named, named)
    if name not in get_args(PythonOption):
        raise ConfigError(
            f"PYTHON_EXECUTION_BACKEND={named[:40]}: not one of {', '.join(get_args(PythonOption))}"
        )
    return name  # type: ignore[return-value]


def _limits(config: ToolConfig) -> SandboxLimits:
    return SandboxLimits(
        seconds=config.python_timeout,
        memory_bytes=config.python_memory_bytes,
        num_processes=config.python_processes,
        network=config.python_network,
    )
