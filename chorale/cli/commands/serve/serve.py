"""``chorale serve``: runs the supervisor with the merged settings and shows its progress."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from chorale.cli.commands.serve.banner import Screen
from chorale.config.engine import ToolConfig, hash_key
from chorale.config.options.help import help_topic, serve_help
from chorale.config.options.settings import OPEN_ADDRESSES, Settings, merge
from chorale.config.options.speculation import check_served
from chorale.errors import ChoraleError, ConfigError
from chorale.serve import supervisor
from chorale.serve.bootstrap import EXIT_CONFIG, EXIT_FAILED
from chorale.serve.logs import LogOptions, configure_logging
from chorale.serve.precheck import check_name, check_start
from chorale.tracing import otel

logger = logging.getLogger(__name__)

SUMMARY = (
    "Serve a gpt-oss model over OpenAI's API (Responses, Chat Completions, Completions) and Anthropic's "
    "(Messages)."
)


def run(arguments: list[str]) -> int:
    topic = help_topic(arguments)
    if topic is not None:
        print(serve_help(SUMMARY, topic))
        return 0
    settings = merge(arguments, os.environ)
    check_served(settings.engine, settings.values)
    if settings.server.data_parallel_backend == "ray":
        return on_ray(settings)
    check_name(settings.engine)
    configure_logging(LogOptions.of(settings.server))
    if settings.server.log_format == "json":
        return _logged(settings)
    return _serve(settings)


def _logged(settings: Settings) -> int:
    """Serves. An error that ends the command is written as a log record."""
    try:
        return _serve(settings)
    except ChoraleError as error:
        logger.critical("%s", error.message)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED


def _serve(settings: Settings) -> int:
    check_start(settings.engine, settings.server)
    screen = Screen(settings, sys.stdout, find_tools(settings))
    for notice in [*settings.notices, *warnings(settings)]:
        screen.notice(notice)
    key_hashes = [hash_key(key) for key in settings.api_keys]
    return supervisor.run(settings.engine, settings.server, screen, api_key_hashes=key_hashes)


def on_ray(settings: Settings) -> int:
    """Serves on a Ray cluster, whose machines have the model, the GPUs and the tools."""
    from chorale.serve.fleet import command

    configure_logging(LogOptions.of(settings.server))
    notices = [*settings.notices, *warnings(settings)]
    return command.run(settings, lambda line: print(line, flush=True), notices)


def find_tools(settings: Settings) -> tuple[str, ...]:
    """Returns the banner's lines about tools: available ones, then requested but unavailable ones."""
    if settings.server.tools == ToolConfig():  # no tool is enabled
        return ()
    from chorale.tools.service import probe_tools  # this import takes 0.25 s

    found = asyncio.run(probe_tools(settings.server.tools, os.environ))
    lines = [f"{name} ({what})" for name, what in found.available.items() if name != "mcp"]
    return (*lines, *(f"{name} is not available: {reason}" for name, reason in found.missing.items()))


def warnings(settings: Settings) -> list[str]:
    """Returns warnings about an open address and traces that are not sent."""
    server, found = settings.server, []
    if server.uds is None and server.host in OPEN_ADDRESSES and not settings.api_keys:
        found.append(
            "listening on all interfaces without an API key: anyone who can reach this port can use it "
            "(set CHORALE_API_KEY)"
        )
    named = next((name for name in otel.ENDPOINTS if os.environ.get(name)), None)
    if named is not None and server.otlp_traces_endpoint is None and not otel.is_installed():
        found.append(f"{named} is set, but no traces are sent: {otel.NEEDS}")
    return found
