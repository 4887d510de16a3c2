"""The command line of ``chorale eval TASK...``."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chorale.config.options.parser import Parser
from chorale.errors import ConfigError
from chorale_evals.tasks import FILE_PREFIX, TASKS

_TASKS = f"{', '.join(TASKS)}, sample, {FILE_PREFIX}PATH (your own questions)"
_EFFORTS = ("low", "medium", "high", "default")


def within(kind: Callable[[str], Any], least: float, most: float = math.inf) -> Callable[[str], Any]:
    """Returns an argparse type that reads an int or a float (``kind``) from ``least`` to ``most``."""

    def read(given: str) -> Any:
        try:
            value = kind(given)
        except ValueError:
            value = math.nan
        if not least <= value <= most or math.isinf(value):
            bound = f"at least {least:g}" if math.isinf(most) else f"{least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{given!r} is not a number: it must be {bound}")
        return value

    return read


def _efforts(given: str) -> tuple[str, ...]:
    efforts = tuple(dict.fromkeys(each.strip() for each in given.split(",")))
    for each in efforts:
        if each not in _EFFORTS:
            raise argparse.ArgumentTypeError(f"{each!r} is not one of {', '.join(_EFFORTS)}")
    return efforts


_COUNT, _NUMBER = within(int, 1), within(float, 0)
# name, type, default, metavar, help
_OPTIONS: tuple[tuple[str, Callable[[str], Any], Any, str, str], ...] = (
    ("base-url", str, None, "URL", "such as http://localhost:8000/v1"),
    ("api-key", str, None, "KEY", "API key (prefer CHORALE_API_KEY)"),
    ("effort", _efforts, "medium", "low,medium,high", "reasoning efforts; 'default' sends none"),
    ("repeats", _COUNT, None, "N", "answers per sample (default: the task's)"),
    ("limit", _COUNT, None, "N", "samples per task, chosen at random"),
    ("seed", int, None, "N", "determines each request's seed and the samples of --limit"),
    ("data", Path, None, "DIR", "folder with the data sets, instead of the web"),
    ("out", Path, None, "DIR", "folder of the journal and the report"),
    ("temperature", _NUMBER, None, "X", "default: the task's, or 1"),
    ("top-p", _NUMBER, None, "X", "nucleus sampling"),
    ("max-tokens", _COUNT, None, "N", "longest answer, reasoning included"),
    ("max-concurrency", _COUNT, 64, "N", "concurrent requests"),
    ("timeout", _COUNT, 3600, "SECONDS", "longest time for one whole answer"),
)


def parser() -> Parser:
    made = Parser(
        "chorale eval",
        usage="chorale eval TASK... [--model MODEL | --base-url URL] [options]",
        description=f"Ask a server the questions of a task and score its answers. Tasks: {_TASKS}. Without "
        "--base-url, a private server is started for --model; options after -- are those of chorale serve. "
        "An interrupted run continues where its journal ends. Other forms: chorale eval report DIR, "
        "chorale eval parity.",
    )
    made.add_argument("tasks", nargs="+", metavar="TASK", help="names, or file:PATH")
    made.add_argument("--model", help="model to serve; with --base-url, its name at that server")
    made.add_argument("--api", choices=("chat", "responses"), default="chat", help="endpoint to use")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    made.add_argument("--resume", action="store_true", help="fail if --out holds no run (default: start one)")
    for name, kind, default, metavar, text in _OPTIONS:
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        made.add_argument(*flags, type=kind, default=default, metavar=metavar, help=text)
    return made


def read(arguments: list[str]) -> argparse.Namespace:
    """Parses a command line. Raises ``ConfigError``."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    given = parser().read(arguments[:split])
    given.serve_arguments = arguments[split + 1 :]
    given.tasks = list(dict.fromkeys(given.tasks))
    if given.base_url is None and given.model is None:
        raise ConfigError("give --model MODEL to start a server, or --base-url URL to use one")
    if given.base_url is not None and given.serve_arguments:
        raise ConfigError("options after -- are for a private server; --base-url uses a running one")
    if given.resume and given.out is None:
        raise ConfigError("--resume requires --out")
    if given.out is None:
        name = Path(given.tasks[0].removeprefix(FILE_PREFIX)).stem
        given.out = Path("eval-runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return given


def api_key(given: argparse.Namespace) -> str | None:
    return given.api_key or os.environ.get("CHORALE_API_KEY") or os.environ.get("OPENAI_API_KEY")


def fields(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of every request that the command line sets."""
    names = ("temperature", "top_p", "max_tokens")
    return {name: value for name in names if (value := getattr(given, name)) is not None}
