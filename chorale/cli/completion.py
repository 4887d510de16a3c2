"""``chorale completion bash | zsh | fish``: a completion script that shtab generates from the parsers."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import cast

import shtab

from chorale.cli.commands.measure import bench_options
from chorale.cli.commands.measure.bench import BENCHES
from chorale.cli.main import COMMANDS
from chorale.config.model_names import SIZES
from chorale.config.options.flags import ENGINE_FLAGS, MODEL_FLAGS, SERVER_FLAGS, TOOL_FLAGS
from chorale.config.options.help import wants_help
from chorale.config.options.parser import Parser
from chorale.config.options.values import Flag
from chorale.config.suggestions import subcommand
from chorale.errors import ConfigError
from chorale.machine.gpus import MODELS

SHELLS = ("bash", "zsh", "fish")
USAGE = """usage: chorale completion {bash,zsh,fish}

bash   source <(chorale completion bash)   in ~/.bashrc
zsh    source <(chorale completion zsh)    in ~/.zshrc, after compinit
fish   chorale completion fish | source    in ~/.config/fish/config.fish"""

NAMES = (*(f"gpt-oss-{size}" for size in SIZES), "demo")
# command -> the function of its module (in COMMANDS) that makes its parser
PARSERS = {
    "chat": "chat_parser",
    "run": "chat_parser",
    "complete": "complete_parser",
    "run-batch": "parser",
    "pull": "pull_parser",
    "list": "list_parser",
    "selfcheck": "parser",
    "verify": "parser",
}
SUBCOMMANDS = {
    "bench": {name: line for name, (_, line) in BENCHES.items()},
    "config": {"show": "the merged configuration"},
    "tools": {"serve": "one tool as an MCP server", "check": "report which tools work here"},
    "vocab": {"export": "write to a folder"},
    "demo": {"export": "write to a folder"},
}
_SERVE_FLAGS = (*MODEL_FLAGS, *ENGINE_FLAGS, *SERVER_FLAGS, *TOOL_FLAGS)
_LIKE_SERVE = (
    *("serve", "fit", "warm", "run-batch", "selfcheck", "config show"),
    *("bench latency", "bench throughput", "bench startup"),
)
_TOOLS = ("tools serve", "tools check")
_WITH_MODEL = (*_LIKE_SERVE, "chat", "run", "complete")
_WORDS = {"completion": SHELLS, "pull": NAMES[:2], "tools serve": ("browser", "python")}
_FOLDERS = ("download-dir", "browser-tool-pages")
_FILES = (
    *("config", "api-key-file", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "mcp-config"),
    *("response-store", "uds"),
)
# A model is one of the names, or a folder.
_MODEL = {
    "bash": "_chorale_model",
    "zsh": f"{{compadd {' '.join(NAMES)}; _files}}",
    "fish": f"{' '.join(NAMES)} (__fish_complete_path)",
    "preamble": {
        "bash": f'_chorale_model() {{ compgen -W "{" ".join(NAMES)}" -- "$1"; compgen -f -- "$1"; }}'
    },
}
# Bash splits --device=cu into three words; shtab's script expects --device cu.
_BASH_EQUALS = """
_chorale() {
    local i words=()
    for (( i = 0; i <= COMP_CWORD; i++ )); do
        if [ "${COMP_WORDS[i]}" != = ]; then words+=("${COMP_WORDS[i]}")
        elif [ "$i" = "$COMP_CWORD" ]; then words+=(""); fi
    done
    local COMP_WORDS=("${words[@]}") COMP_CWORD=$(( ${#words[@]} - 1 ))
    _shtab_chorale
}
complete -o bashdefault -F _chorale chorale"""


def run(arguments: list[str]) -> int:
    if not arguments or wants_help(arguments):
        print(USAGE)
        return 0
    shell = arguments[0]
    if shell not in SHELLS:
        raise subcommand(shell, SHELLS, "shell", f"choose one of {', '.join(SHELLS)}")
    if len(arguments) > 1:
        raise ConfigError(f"unexpected argument {arguments[1]!r}")
    print(shtab.complete(whole_parser(), shell) + (_BASH_EQUALS if shell == "bash" else ""))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Returns a parser with all commands, for completion only."""
    made = argparse.ArgumentParser("chorale")
    made.add_argument("--version", action="store_true", help="print the version")
    commands = made.add_subparsers()
    for name, (_, line) in COMMANDS.items():
        command = commands.add_parser(name, help=line, parents=[_parser(name)], add_help=False)
        if name in SUBCOMMANDS:
            members = command.add_subparsers()
            for member, about in SUBCOMMANDS[name].items():
                parents = [_parser(f"{name} {member}")]
                members.add_parser(member, help=about, parents=parents, add_help=False)
    return made


def _parser(command: str) -> argparse.ArgumentParser:
    """Returns the parser of a command, with the values of its options and arguments."""
    made = _own_parser(command)
    if command in ("fit", "warm"):
        made.add_argument("--gpu", choices=[model.name.lower() for model in MODELS], help="name of a GPU")
    if command == "config show":
        made.add_argument(
            "--changed", action="store_true", help="show only values that differ from the defaults"
        )
    for flag in _SERVE_FLAGS if command in _LIKE_SERVE else TOOL_FLAGS if command in _TOOLS else ():
        _add_flag(made, flag)
    if command == "tools serve":
        for flag in SERVER_FLAGS[:2]:
            _add_flag(made, flag)
    for action in made._actions:
        if action.type is Path:
            _complete(action, shtab.FILE)
    if command in _WORDS:
        _argument(made).choices = _WORDS[command]
    elif command in _WITH_MODEL:
        _complete(_argument(made), _MODEL)
    return made


def _own_parser(command: str) -> argparse.ArgumentParser:
    name, _, member = command.partition(" ")
    if name == "bench" and member:
        return bench_options.PARSERS[member]()
    if name in PARSERS:
        module = importlib.import_module(f"chorale.cli.{COMMANDS[name][0].partition(':')[0]}")
        return cast(Parser, getattr(module, PARSERS[name])())
    return argparse.ArgumentParser(command)


def _add_flag(made: argparse.ArgumentParser, flag: Flag) -> None:
    name, about = f"--{flag.name}", flag.help.replace("%", "%%")
    if name in made._option_string_actions:  # the command has its own option with this name
        return
    if flag.kind == "bool":
        made.add_argument(name, f"--no-{flag.name}", action="store_true", help=about)
        return
    action = made.add_argument(name, choices=flag.choices or None, help=about)
    if flag.name in _FOLDERS:
        _complete(action, shtab.DIRECTORY)
    elif flag.name in _FILES:
        _complete(action, shtab.FILE)


def _argument(made: argparse.ArgumentParser) -> argparse.Action:
    """Returns the first argument of a command that is not an option."""
    found = made._get_positional_actions()
    return found[0] if found else made.add_argument("argument", nargs="?")


def _complete(action: argparse.Action, how: object) -> None:
    action.complete = how  # type: ignore[attr-defined]  # the attribute that shtab reads
