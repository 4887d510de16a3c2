"""The command line of ``chorale eval TASK...``."""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

from chorale.config.options.parser import Parser
from chorale.errors import ConfigError
from chorale_evals.task import EFFORTS
from chorale_evals.tasks import FILE_PREFIX, TASKS
from chorale_evals.tasks.elsewhere import ELSEWHERE, Wanted, explain

_TASKS = f"{', '.join(TASKS)}, sample, {FILE_PREFIX}PATH (your own questions)"
_EFFORTS = (*EFFORTS, "default")
_URL = "http://localhost:8000/v1"


def parser() -> Parser:
    made = Parser(
        "chorale eval",
        usage="chorale eval TASK... [--model MODEL | --base-url URL] [options]",
        description=f"Ask a server the questions of a task and score its answers. Tasks: {_TASKS}. Without "
        "--base-url, a private server is started for --model; options after -- are those of chorale serve. "
        f"An interrupted run continues where its journal ends. For {', '.join(ELSEWHERE)} the command of the "
        "tool that runs them is printed. Other forms: chorale eval compare A B, chorale eval report DIR, "
        "chorale eval parity.",
    )
    made.add_argument("tasks", nargs="+", metavar="TASK", help="names, or file:PATH")
    made.add_argument("--model", help="model to serve; with --base-url, its name at that server")
    made.add_argument("--base-url", "--base_url", metavar="URL", help=f"such as {_URL}")
    made.add_argument("--api-key", "--api_key", help="API key (prefer CHORALE_API_KEY)")
    made.add_argument("--api", choices=("chat", "responses"), default="chat", help="endpoint to use")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_run(made)
    _add_request(made)
    return made


def _add_run(made: Parser) -> None:
    efforts = "reasoning efforts; 'default' sends none"
    made.add_argument("--effort", type=_efforts, default="medium", metavar="low,medium,high", help=efforts)
    made.add_argument(
        "--repeats", type=_positive, metavar="N", help="answers per sample (default: the task's)"
    )
    made.add_argument("--limit", type=_positive, metavar="N", help="samples per task, chosen at random")
    made.add_argument("--seed", type=int, help="gives each request its own seed, and --limit its samples")
    made.add_argument(
        "--data", type=Path, metavar="DIR", help="folder with the data sets, instead of the hub"
    )
    made.add_argument("--out", type=Path, metavar="DIR", help="folder of the journal and the report")
    made.add_argument("--resume", action="store_true", help="fail if --out holds no run (default: start one)")
    for name in ("input", "output"):
        made.add_argument(
            f"--price-{name}", f"--price_{name}", type=_number, metavar="PRICE", help="per million tokens"
        )


def _add_request(made: Parser) -> None:
    longest = "longest answer, reasoning included"
    made.add_argument("--temperature", type=_number, metavar="X", help="default: the task's, or 1")
    made.add_argument("--top-p", "--top_p", type=_number, metavar="X", help="nucleus sampling")
    made.add_argument("--max-tokens", "--max_tokens", type=_positive, metavar="N", help=longest)
    made.add_argument(
        "--max-concurrency",
        "--max_concurrency",
        type=_positive,
        default=64,
        metavar="N",
        help="requests at once",
    )
    made.add_argument(
        "--timeout", type=_positive, default=3600, metavar="SECONDS", help="for one whole answer"
    )


def read(arguments: list[str]) -> argparse.Namespace:
    """Parses a command line. Raises ``ConfigError``, also for a task that another tool runs."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    given = parser().read(arguments[:split])
    given.serve_arguments = arguments[split + 1 :]
    given.tasks = list(dict.fromkeys(given.tasks))
    _refuse_tasks_of_other_tools(given)
    if given.base_url is None and given.model is None:
        raise ConfigError("give --model MODEL to start a server, or --base-url URL to use one")
    if given.base_url is not None and given.serve_arguments:
        raise ConfigError("options after -- are for a private server; --base-url uses a running one")
    if given.resume and given.out is None:
        raise ConfigError("--resume requires --out")
    given.out = given.out or _default_folder(given.tasks[0])
    return given


def _refuse_tasks_of_other_tools(given: argparse.Namespace) -> None:
    for name in given.tasks:
        if name in ELSEWHERE:
            url = (given.base_url or _URL).rstrip("/")
            effort = None if given.effort[0] == "default" else given.effort[0]
            folder = str(given.out or Path("eval-runs", name))
            model = given.model or "gpt-oss-20b"
            wanted = Wanted(name, url, model, effort, given.limit, given.max_concurrency, folder)
            raise ConfigError(explain(wanted))


def _default_folder(task: str) -> Path:
    """Returns a new folder's name below ``eval-runs``."""
    name = Path(task.removeprefix(FILE_PREFIX)).stem
    return Path("eval-runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def api_key(given: argparse.Namespace) -> str | None:
    return given.api_key or os.environ.get("CHORALE_API_KEY") or os.environ.get("OPENAI_API_KEY")


def fields(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of every request that the command line sets."""
    chosen = {"temperature": given.temperature, "top_p": given.top_p, "max_tokens": given.max_tokens}
    return {name: value for name, value in chosen.items() if value is not None}


def _efforts(given: str) -> tuple[str, ...]:
    efforts = tuple(dict.fromkeys(each.strip() for each in given.split(",")))
    for each in efforts:
        if each not in _EFFORTS:
            raise argparse.ArgumentTypeError(f"{each!r} is not one of {', '.join(_EFFORTS)}")
    return efforts


def _positive(given: str) -> int:
    try:
        value = int(given)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{given!r} is not a positive integer")
    return value


def _number(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if value < 0 or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{given!r} is not a number of at least 0")
    return value
