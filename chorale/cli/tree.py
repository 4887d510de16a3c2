"""The tree of commands and options, built from the commands' own tables and parsers.

Shell completion is generated from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chorale.cli.bench import BENCHES
from chorale.cli.bench.offline_options import PARSERS
from chorale.cli.bench.serve import parser as bench_serve_parser
from chorale.cli.commands.chat import chat_parser
from chorale.cli.commands.chat import parser as talk_parser
from chorale.cli.commands.models import list_parser, pull_parser
from chorale.cli.commands.run_batch import parser as run_batch_parser
from chorale.cli.commands.selfcheck import parser as selfcheck_parser
from chorale.cli.gpus import MODELS
from chorale.cli.main import COMMANDS
from chorale.cli.options.flags import ENGINE_FLAGS, MODEL_FLAGS, SERVER_FLAGS, TOOL_FLAGS
from chorale.cli.options.values import Flag
from chorale.model.names import SIZES

Takes = Literal["nothing", "value", "file", "folder"]
SHELLS = ("bash", "zsh", "fish")
NAMES = (*(f"gpt-oss-{size}" for size in SIZES), "demo")  # model names for completion
_FOLDERS = ("download-dir", "browser-tool-pages")
_FILES = (
    *("config", "api-key-file", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "mcp-config"),
    *("response-store", "uds"),
)


@dataclass(frozen=True, slots=True)
class Option:
    """An option. ``name`` includes the dashes. ``choices``: its possible values, if they are few."""

    name: str
    help: str = ""
    takes: Takes = "nothing"
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    ``path``: its words after "chorale". ``words``: possible arguments. ``paths``: accepts a path.
    """

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...] = ()
    words: tuple[str, ...] = ()
    paths: bool = False


def commands() -> tuple[Command, ...]:
    """Returns all commands, each group (bench, tools) before its members."""
    return (*(Command((name,), line, *_parts(name)) for name, (_, line) in COMMANDS.items()), *_inner())


def _parts(name: str) -> tuple[tuple[Option, ...], tuple[str, ...], bool]:
    """Returns (options, words, whether it accepts a path) of a one-word command."""
    match name:
        case "serve":
            return _serve_options(), NAMES, True
        case "fit":
            gpu = Option("--gpu", "compute for the named GPU", "value", _gpu_names())
            return (gpu, *_serve_options()), NAMES, True
        case "warm":
            gpu = Option("--gpu", "compile for a GPU that need not be here", "value", _gpu_names())
            return (gpu, *_serve_options()), NAMES, True
        case "run-batch":
            return (*_options(run_batch_parser()), *_serve_options()), NAMES, True
        case "selfcheck":
            return (*_options(selfcheck_parser()), *_serve_options()), NAMES, True
        case "chat":
            return _options(chat_parser()), NAMES, True
        case "complete":
            return _options(talk_parser("complete", "")), NAMES, True
        case "pull":
            return _options(pull_parser()), NAMES[:2], False
        case "list":
            return _options(list_parser()), (), False
        case "completion":
            return (), SHELLS, False
    inner = {"bench": tuple(BENCHES), "tools": ("serve", "check"), "config": ("show",)}
    return (), inner.get(name, ("export",) if name in ("vocab", "demo") else ()), False


def _inner() -> Iterator[Command]:
    serve = _serve_options()
    parsers = {"serve": bench_serve_parser, **PARSERS}
    for name, (_, line) in BENCHES.items():
        serves = name in ("latency", "throughput", "startup")
        words = NAMES if serves else SIZES if name == "make-checkpoint" else ()
        options = (*_options(parsers[name]()), *(serve if serves else ()))
        yield Command(("bench", name), line, options, words, paths=serves or name == "report")
    changed = Option("--changed", "show only values that differ from the defaults")
    yield Command(("config", "show"), "the merged configuration", (changed, *serve), NAMES, paths=True)
    tools = tuple(option for flag in TOOL_FLAGS for option in _of_flag(flag))
    where = (
        Option("--host", "address to listen on", "value"),
        Option("--port", "port to listen on", "value"),
    )
    yield Command(("tools", "serve"), "one tool as an MCP server", (*where, *tools), ("browser", "python"))
    yield Command(("tools", "check"), "report which tools work here", tools)
    for name in ("vocab", "demo"):
        yield Command((name, "export"), "write to a folder", paths=True)


def _serve_options() -> tuple[Option, ...]:
    flags = (*MODEL_FLAGS, *ENGINE_FLAGS, *SERVER_FLAGS, *TOOL_FLAGS)
    return tuple(option for flag in flags for option in _of_flag(flag))


def _of_flag(flag: Flag) -> Iterator[Option]:
    if flag.kind == "bool":
        yield Option(f"--{flag.name}", flag.help)
        yield Option(f"--no-{flag.name}", flag.help)
        return
    takes: Takes = "folder" if flag.name in _FOLDERS else "file" if flag.name in _FILES else "value"
    yield Option(f"--{flag.name}", flag.help, takes, flag.choices)


def _options(parser: argparse.ArgumentParser) -> tuple[Option, ...]:
    return tuple(
        Option(
            name,
            action.help or "",
            "nothing" if action.nargs == 0 else "file" if action.type is Path else "value",
            tuple(map(str, action.choices or ())),
        )
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for name in action.option_strings
        if name.startswith("--") and "_" not in name
    )


def _gpu_names() -> tuple[str, ...]:
    return tuple(model.name.lower() for model in MODELS)
