"""``chorale``: finds the command, imports only what it needs, and maps errors to exit codes.

Exit codes: 0 success; 1 the command failed; 2 the command line or configuration is invalid; 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Sequence

from chorale.cli.error import print_error
from chorale.errors import ChoraleError, ConfigError
from chorale.machine.processes import collect_rarely
from chorale.version import __version__

# command -> ("module" or "module:function" in this package, one line of help). The function maps arguments to
# an exit code.
COMMANDS = {
    "serve": ("commands.serve.serve", "serve a model over OpenAI's and Anthropic's APIs"),
    "chat": ("commands.client.chat", "talk to a model in the terminal"),
    "run": ("commands.client.chat", "the same as chat"),
    "complete": ("commands.client.complete", "continue raw text in the terminal"),
    "run-batch": ("commands.serve.run_batch", "answer a file of requests (OpenAI's batch format)"),
    "bench": ("commands.measure.bench", "measure a server, the engine, the start-up or the kernels"),
    "eval": ("commands.measure.eval", "score a model's answers, or compare two servers"),
    "verify": ("commands.measure.verify", "repeat a recorded answer, and compare all bits"),
    "pull": ("commands.models.models:run_pull", "download a model, or resume a download"),
    "list": ("commands.models.models:run_list", "list the models on this machine"),
    "fit": ("commands.machine.fit", "show whether a model fits on this machine or a GPU"),
    "warm": ("commands.machine.warm", "compile a server's kernels in advance"),
    "doctor": ("commands.machine.doctor", "check this machine and suggest fixes"),
    "selfcheck": ("commands.measure.selfcheck", "check that this machine computes correct results"),
    "config": ("commands.serve.config", "show the configuration and where each value comes from"),
    "collect-env": ("commands.machine.collect_env", "print versions and hardware for a bug report"),
    "tools": ("commands.serve.tools", "check the built-in tools, or serve them over MCP"),
    "merge": ("commands.models.merge", "write a checkpoint with a LoRA adapter added"),
    "vocab": ("commands.models.export:run_vocab", "write the vocabulary for other harmony tools"),
    "completion": ("completion", "print a completion script for bash, zsh or fish"),
    "demo": ("commands.models.export:run_demo", "write the demo model to a folder, as a checkpoint"),
}
# Commands of Ollama -> what does the same here.
OLLAMA = {
    "download": "chorale pull",
    "ls": "chorale list",
    "models": "chorale list",
    "ps": "curl http://localhost:8000/v1/models",
    "rm": "rm -r ~/.cache/huggingface/hub/models--openai--gpt-oss-20b",
    "start": "chorale serve",
}


def unsupported(system: str) -> str | None:
    """Returns why this operating system is unsupported, or None. ``system``: ``platform.system()``."""
    if system != "Windows":
        return None
    return "Windows is not supported (Chorale needs unix sockets and signals); use WSL 2"


def usage() -> str:
    lines = [
        f"chorale {__version__}",
        "A serving engine for gpt-oss-20b and gpt-oss-120b.",
        "",
        "usage: chorale COMMAND [options]",
        "",
        *(f"  {name:<12} {line}" for name, (_, line) in COMMANDS.items()),
        "",
        "Start here:  chorale serve               (a small built-in model, no download)",
        "             chorale serve gpt-oss-20b",
        "",
        "chorale COMMAND --help shows the options of a command.",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as in "| head"; Python must not flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _run(given: list[str]) -> int:
    if len(given) > 1 and given[0] == "help":
        given = [given[1], "--help"]
    if not given or given[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if given[0] in ("-V", "--version", "version"):
        print(f"chorale {__version__}")
        return 0
    return _dispatch(given[0], given[1:])


def _dispatch(command: str, rest: list[str]) -> int:
    if command.startswith("-"):
        return _fail(f"unknown option {command} (chorale --help lists the commands)", 2)
    if command not in COMMANDS:
        from chorale.config.suggestions import subcommand

        if command in OLLAMA:
            return _fail(f"unknown command {command!r}; the same here is: {OLLAMA[command]}", 2)
        return _fail(subcommand(command, COMMANDS, "command", "chorale --help lists the commands").message, 2)
    if (why := unsupported(platform.system())) is not None:
        return _fail(why, 2)
    collect_rarely()
    try:
        path, _, function = COMMANDS[command][0].partition(":")
        module = importlib.import_module(f"chorale.cli.{path}")  # slow enough to be interrupted
        return int(getattr(module, function or "run")(rest))
    except ConfigError as error:
        return _fail(error.message, 2)
    except ChoraleError as error:
        return _fail(error.message, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except OSError as error:  # an unreadable file, a full disk: the system's message suffices
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)


def _fail(message: str, code: int) -> int:
    print_error(message)
    return code
