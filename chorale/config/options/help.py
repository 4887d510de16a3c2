"""Help pages of the commands that share the flag table."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chorale.config.engine import EngineConfig, ServerConfig, ToolConfig
from chorale.config.options.flags import ENGINE_FLAGS, MODEL_FLAGS, SERVER_FLAGS, TOOL_FLAGS
from chorale.config.options.values import Flag
from chorale.config.options.vllm_flags import KNOWN_FLAGS
from chorale.config.suggestions import nearest
from chorale.errors import ConfigError

WIDEST, COLUMN = 100, 38
ROOMS: dict[str, type] = {"engine": EngineConfig, "server": ServerConfig, "tools": ToolConfig}
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
GROUPS: dict[str, tuple[Flag, ...]] = {
    "model": MODEL_FLAGS,
    "engine": ENGINE_FLAGS,
    "server": SERVER_FLAGS,
    "tools": TOOL_FLAGS,
}
# vLLM's names of help groups -> ours.
VLLM_GROUPS = {"modelconfig": "model", "loadconfig": "model", "frontend": "server"} | dict.fromkeys(
    ("cacheconfig", "schedulerconfig", "parallelconfig", "compilationconfig", "vllmconfig"), "engine"
)


def width() -> int:
    """Returns the width of a help page: the terminal's, within limits, or 100 without a terminal."""
    return max(60, min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST))


def wants_help(arguments: Sequence[str]) -> bool:
    """Returns whether ``-h``, ``--help`` or ``--help=...`` occurs before any ``--``."""
    return help_topic(arguments) is not None


def help_topic(arguments: Sequence[str]) -> str | None:
    """Returns the word of ``--help=WORD``, "" for plain ``--help``, or None."""
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for token in before:
        if token.startswith("--help="):
            return token.partition("=")[2]
        if token in ("-h", "--help"):
            return ""
    return None


def serve_help(summary: str, topic: str) -> str:
    """Returns the help page of ``chorale serve``, or a part of it.

    ``topic``: a group, a flag, a part of a name, "all" or "listgroup". Raises ``ConfigError``.
    """
    wanted = topic.strip().lstrip("-").replace("_", "-").lower()
    if wanted in ("", "all", "page"):
        return _whole_page(summary)
    if wanted == "listgroup":
        listed = [f"  {name:<8} {len(flags)} flags" for name, flags in GROUPS.items()]
        return "\n".join(["chorale serve --help=GROUP, where GROUP is", "", *listed, "  all      every flag"])
    group = VLLM_GROUPS.get(wanted, wanted)
    if group in GROUPS:
        return "\n".join([f"{group}:", *(line for flag in GROUPS[group] for line in _entry(flag))])
    return "\n".join(_about(wanted, topic))


def _about(wanted: str, topic: str) -> list[str]:
    """Returns help on the flag of that name, else on all flags whose names contain the word."""
    flags = [flag for group in GROUPS.values() for flag in group] + list(KNOWN_FLAGS)
    named = wanted.removeprefix("no-")
    found = [flag for flag in flags if named in (flag.name, *flag.aliases)]
    found = found or [flag for flag in flags if wanted in flag.name]
    if not found:
        names = [*GROUPS, "all", "listgroup", *(flag.name for flag in flags)]
        hint = nearest(wanted, names) or "; chorale serve --help=listgroup lists the groups"
        raise ConfigError(f"--help={topic}: no group or flag has that name{hint}")
    return [line for flag in found for line in (_entry(flag) if flag.target else _known_entry(flag))]


def _known_entry(flag: Flag) -> list[str]:
    verdict = "refused" if flag.effect == "refused" else f"accepted, {flag.effect}"
    return [f"  --{flag.name}", *_wrap(f"flag of vllm serve, {verdict}: {flag.note}", " " * COLUMN)]


def _whole_page(summary: str) -> str:
    lines = [
        "usage: chorale serve [MODEL] [options]",
        "",
        *_wrap(summary, ""),
        *_wrap(
            "MODEL is a folder, a hub id such as openai/gpt-oss-20b (or gpt-oss-20b), or demo (the default).",
            "",
        ),
        *_wrap("chorale serve --help=WORD shows one group (model, engine, server, tools) or one flag.", ""),
    ]
    for title, flags in GROUPS.items():
        lines += ["", f"{title}:", *(line for flag in flags for line in _entry(flag))]
    for title, effects in (
        ("flags of vllm serve that are accepted (a notice explains each)", ("not needed", "no effect")),
        ("flags of vllm serve that are refused, with a reason", ("refused",)),
    ):
        names = ", ".join(sorted(flag.name for flag in KNOWN_FLAGS if flag.effect in effects))
        lines += ["", f"{title}:", *_wrap(names, "  ")]
    return "\n".join([*lines, "", *(line for text in ENDING for line in _wrap(text, ""))])


ENDING = (
    "Dashes and underscores are equivalent. --no-X turns an option off. Sizes may end in k, K, M, GiB.",
    "Parts of a JSON value may be given separately (--override-generation-config.temperature 0.7).",
    "chorale config show [options] prints the resulting configuration.",
)


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _entry(flag: Flag) -> list[str]:
    """Returns the option and its help, in the same line or, for a long option, below."""
    shown, about = _shown(flag), flag.help + _default(flag)
    if len(shown) > width():  # too long: its values move into the help
        shown, _, values = shown.partition(" {")
        about = f"one of {values.rstrip('}').replace(',', ', ')}: {about}"
    lines = _wrap(about, " " * COLUMN)
    if len(shown) + 2 < COLUMN:
        lines[0] = shown.ljust(COLUMN) + lines[0].lstrip()
        return lines
    return [shown, *lines]


def _default(flag: Flag) -> str:
    """Returns the default such as `` (8000)``, or nothing if there is none or the help mentions it."""
    room, _, attribute = (flag.target or "").partition(".")
    if room not in ROOMS or flag.kind in ("list", "json"):
        return ""
    value: Any = {field.name: field.default for field in dataclasses.fields(ROOMS[room])}[attribute]
    if value in (None, "", False):
        return ""
    if value is True:
        return " (on)"
    if flag.kind == "size":
        value = next((f"{value // size}{unit}" for size, unit in UNITS if value % size == 0), value)
    return f" ({int(value) if isinstance(value, float) and value.is_integer() else value})"


def _shown(flag: Flag) -> str:
    shown = f"--{flag.name}"
    if flag.kind == "bool":
        shown = f"--[no-]{flag.name}"
    elif flag.choices:
        shown += " {" + ",".join(flag.choices) + "}"
    else:
        shown += " " + {"list": "A [B ...]", "json": "JSON", "int": "N", "size": "N", "float": "X"}.get(
            flag.kind, "VALUE"
        )
    return f"  {shown}"


class Formatter(argparse.HelpFormatter):
    """Formats argparse's help like the flag table's: one spelling per option, kind of value, default."""

    def __init__(self, prog: str, **more: Any) -> None:
        super().__init__(prog, **{"width": width(), "max_help_position": COLUMN} | more)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = ", ".join(name for name in action.option_strings if "_" not in name)
        if action.nargs == 0:
            return shown
        return f"{shown} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        names: dict[Any, str] = {int: "N", float: "X", Path: "FILE"}
        return str(action.metavar or names.get(action.type, "TEXT"))

    def _format_action(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        nothing = action.default in (None, "", argparse.SUPPRESS) or action.default is False
        if action.option_strings and not nothing and action.default != []:
            shown.help = f"{action.help or ''} (%(default)s)".strip()
        return super()._format_action(shown)
