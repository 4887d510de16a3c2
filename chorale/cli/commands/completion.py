"""``chorale completion bash | zsh | fish``: a shell completion script, generated from the option tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from chorale.cli.options.help import wants_help
from chorale.cli.tree import SHELLS, Command, Option, commands
from chorale.cli.words import subcommand
from chorale.errors import ConfigError

USAGE = """usage: chorale completion {bash,zsh,fish}

bash   source <(chorale completion bash)   in ~/.bashrc
zsh    source <(chorale completion zsh)    in ~/.zshrc, after compinit
fish   chorale completion fish | source    in ~/.config/fish/config.fish"""


def run(arguments: list[str]) -> int:
    if not arguments or wants_help(arguments):
        print(USAGE)
        return 0
    if arguments[0] not in SHELLS:
        raise subcommand(arguments[0], SHELLS, "shell", f"choose one of {', '.join(SHELLS)}")
    if len(arguments) > 1:
        raise ConfigError(f"unexpected argument {arguments[1]!r}")
    make = {"bash": bash, "zsh": zsh, "fish": fish}[arguments[0]]
    print("\n".join(make(commands())))
    return 0


def _groups(found: Sequence[Command]) -> str:
    """Returns all command paths that start with "chorale", as a shell's case pattern."""
    return "|".join(shlex.quote(" ".join(("chorale", *command.path))) for command in found)


def _all_options(command: Command) -> list[Option]:
    return [*command.options, Option("--help", "show help")]


# --------------------------------------------------------------------------- bash


def bash(found: Sequence[Command]) -> Iterator[str]:
    yield "# bash completion of chorale"
    yield "_chorale() {"
    yield '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" at=chorale word i'
    yield "    local options= words= paths="
    yield '    if [ "$cur" = = ]; then cur='
    yield '    elif [ "$prev" = = ]; then prev="${COMP_WORDS[COMP_CWORD-2]}"; fi'
    yield "    for (( i = 1; i < COMP_CWORD; i++ )); do"
    yield f'        case "$at ${{COMP_WORDS[i]}}" in {_groups(found)}) at="$at ${{COMP_WORDS[i]}}" ;; esac'
    yield "    done"
    yield '    case "$at" in'
    top = " ".join((*(command.path[0] for command in found if len(command.path) == 1), "--help", "--version"))
    yield f"    chorale) words={shlex.quote(top)} ;;"
    for command in found:
        yield f"    {shlex.quote(' '.join(('chorale', *command.path)))})"
        yield f"        options={shlex.quote(' '.join(option.name for option in _all_options(command)))}"
        yield f"        words={shlex.quote(' '.join(command.words))} paths={'yes' if command.paths else ''}"
        yield from _bash_values(command)
        yield "        ;;"
    yield "    esac"
    yield '    case "$cur" in'
    yield '    -*) COMPREPLY=( $(compgen -W "$options" -- "$cur") ) ;;'
    yield "    *)"
    yield '        COMPREPLY=( $(compgen -W "$words" -- "$cur") )'
    yield '        if [ -n "$paths" ]; then COMPREPLY+=( $(compgen -f -- "$cur") ); fi ;;'
    yield "    esac"
    yield "}"
    yield "complete -o filenames -F _chorale chorale"


def _bash_values(command: Command) -> Iterator[str]:
    """Yields the completion of option values: choices, paths, or nothing."""
    by_values: dict[str, list[str]] = {}
    for option in command.options:
        if option.takes == "nothing":
            continue
        words = shlex.quote(" ".join(option.choices))
        paths = {"file": "-f", "folder": "-d"}.get(option.takes, "")
        action = f"-W {words}" if option.choices else paths
        by_values.setdefault(action, []).append(option.name)
    if not by_values:
        return
    yield '        case "$prev" in'
    for action, names in by_values.items():
        reply = f'COMPREPLY=( $(compgen {action} -- "$cur") )' if action else "COMPREPLY=()"
        yield f"        {'|'.join(names)}) {reply}; return ;;"
    yield "        esac"


# --------------------------------------------------------------------------- zsh


def zsh(found: Sequence[Command]) -> Iterator[str]:
    yield "#compdef chorale"
    yield "_chorale() {"
    yield "    local at=chorale"
    yield "    local -a words_here"
    yield "    while (( CURRENT > 2 )); do"
    yield f'        case "$at $words[2]" in ({_groups(found)})'
    yield '            at="$at $words[2]"; shift words; (( CURRENT-- )) ;;'
    yield "        (*) break ;; esac"
    yield "    done"
    yield '    case "$at" in'
    top = [f"{command.path[0]}:{command.help}" for command in found if len(command.path) == 1]
    yield f"    (chorale) words_here=({' '.join(map(shlex.quote, top))})"
    yield "        _describe command words_here ;;"
    for command in found:
        yield f"    ({shlex.quote(' '.join(('chorale', *command.path)))}) _arguments -S \\"
        for option in _all_options(command):
            yield f"        {shlex.quote(_zsh_option(option))} \\"
        words = f"({' '.join(command.words)})" if command.words else " "
        kind = f"{{compadd {' '.join(command.words)}; _files}}" if command.paths and command.words else (
            "_files" if command.paths else words
        )  # fmt: skip
        yield f"        {shlex.quote(f'*:argument:{kind}')} ;;"
    yield "    esac"
    yield "}"
    yield "compdef _chorale chorale"


def _zsh_option(option: Option) -> str:
    about = option.help.replace("\\", "").replace("[", "(").replace("]", ")").replace(":", "\\:")
    shown = f"*{option.name}[{about}]"
    if option.takes == "nothing":
        return shown
    values = f"({' '.join(option.choices)})" if option.choices else " "
    return shown + ":value:" + {"file": "_files", "folder": "_files -/"}.get(option.takes, values)


# --------------------------------------------------------------------------- fish


def fish(found: Sequence[Command]) -> Iterator[str]:
    yield "# fish completion of chorale"
    yield "function __chorale_at"
    yield "    set -l at chorale"
    yield "    for word in (commandline -opc)[2..-1]"
    patterns = " ".join(shlex.quote(" ".join(("chorale", *command.path))) for command in found)
    yield f'        if contains -- "$at $word" {patterns}'
    yield '            set at "$at $word"'
    yield "        end"
    yield "    end"
    yield '    test "$at" = "$argv[1]"'
    yield "end"
    yield "complete -c chorale -f"
    for command in found:
        if len(command.path) == 1:
            yield _fish_word("chorale", command.path[0], command.help)
    for command in found:
        at = " ".join(("chorale", *command.path))
        when = shlex.quote(f"__chorale_at '{at}'")
        for word in command.words:
            yield _fish_word(at, word, "")
        if command.paths:
            yield f"complete -c chorale -n {when} -F"
        for option in _all_options(command):
            value = _fish_value(option)
            yield f"complete -c chorale -n {when} -l {option.name[2:]}{value} -d {_fish(option.help)}"


def _fish_word(at: str, word: str, about: str) -> str:
    when = shlex.quote(f"__chorale_at '{at}'")
    return f"complete -c chorale -n {when} -a {word}" + (f" -d {_fish(about)}" if about else "")


def _fish_value(option: Option) -> str:
    if option.takes == "nothing":
        return ""
    if option.choices:
        return f" -xa {_fish(' '.join(option.choices))}"
    return " -x" if option.takes == "value" else " -rF"


def _fish(text: str) -> str:
    """Quotes text for fish: single quotes, in which only the quote and the backslash are escaped."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
