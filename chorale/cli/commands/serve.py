"""``chorale serve``: runs the supervisor with the merged settings and shows its progress."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from chorale.api.http.auth import hash_key
from chorale.cli.banner import Screen
from chorale.cli.options.help import flag_help, help_topic
from chorale.cli.options.settings import OPEN_ADDRESSES, Settings, merge
from chorale.cli.options.speculation import check_served
from chorale.model.hub import DEMO, check_family, find_folder
from chorale.model.names import full_name
from chorale.serve import logs, supervisor
from chorale.serve.precheck import check_start
from chorale.tools.service import probe_tools

SUMMARY = "Serve a gpt-oss checkpoint over the OpenAI API (Responses, Chat Completions, Completions)."


def run(arguments: list[str]) -> int:
    topic = help_topic(arguments)
    if topic is not None:
        print(flag_help("serve", SUMMARY, topic))
        return 0
    settings = merge(arguments, os.environ)
    check_served(settings.engine, settings.values)
    check_model(settings)
    configure_logging(settings.server.log_level)
    check_start(settings.engine, settings.server)
    screen = Screen(settings, sys.stdout, find_tools(settings))
    for notice in [*settings.notices, *warnings(settings)]:
        screen.notice(notice)
    return supervisor.run(
        settings.engine,
        settings.server,
        api_key_hashes=[hash_key(key) for key in settings.api_keys],
        on_status=screen.on_status,
        on_listening=screen.on_listening,
        on_stopping=screen.on_stopping,
    )


def check_model(settings: Settings) -> None:
    """Raises ``ConfigError`` for a missing folder or another model family, before anything starts."""
    engine = settings.engine
    if engine.model != DEMO and find_folder(engine.model) is None:
        check_family(full_name(engine.model), revision=engine.revision, download_dir=engine.download_dir)


def find_tools(settings: Settings) -> tuple[str, ...]:
    """Returns the banner's lines about tools: available ones, then requested but unavailable ones."""
    found = asyncio.run(probe_tools(settings.server.tools, os.environ))
    lines = [f"{name} ({what})" for name, what in found.available.items() if name != "mcp"]
    return (*lines, *(f"{name} is not available: {reason}" for name, reason in found.missing.items()))


def configure_logging(level: str) -> None:
    """Logs one line per record to stderr. The table and the banner use stdout."""
    logs.configure_logging(level, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, getattr(logging, level.upper())))


def warnings(settings: Settings) -> list[str]:
    """Returns warnings about an address that other machines can reach."""
    server = settings.server
    if server.uds is None and server.host in OPEN_ADDRESSES and not settings.api_keys:
        return ["listening on all interfaces without an API key: anyone who can reach this port can use it "
                "(set CHORALE_API_KEY)"]  # fmt: skip
    return []
