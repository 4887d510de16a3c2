"""``chorale config show``: the merged configuration of ``chorale serve``, each value with its origin."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from chorale.config.options.flags import ENGINE_FLAGS, MODEL_FLAGS, SERVER_FLAGS, TOOL_FLAGS
from chorale.config.options.help import wants_help
from chorale.config.options.settings import Settings, merge
from chorale.config.options.values import Flag
from chorale.config.suggestions import subcommand

_WITH_PASSWORD = re.compile(r"(://[^:@/]*:)[^@/]*@")  # the password in a URL

DECIDED = ("int", "size", "bool", "float")  # kinds for which None means "decided at start"
DECIDED_TEXT = ("response-store", "cudagraph-capture-sizes")
USAGE = """usage: chorale config show [--changed] [MODEL] [the options of chorale serve]

--changed shows only values that differ from the defaults."""


def run(arguments: list[str]) -> int:
    if not arguments or wants_help(arguments):
        print(USAGE)
        return 0
    if arguments[0] != "show":
        raise subcommand(arguments[0], ("show",), "config command", USAGE)
    rest = [token for token in arguments[1:] if token != "--changed"]
    settings = merge(rest, os.environ)
    print(render(settings, changed=len(rest) < len(arguments) - 1))
    for notice in settings.notices:
        print(f"note: {notice}")
    return 0


def render(settings: Settings, *, changed: bool = False) -> str:
    """Returns a line per setting: name, value, origin. Keys appear as a count only.

    ``changed``: include only settings that the operator set.
    """
    rows = [
        _row(flag, settings)
        for flag in (*MODEL_FLAGS, *ENGINE_FLAGS, *SERVER_FLAGS, *TOOL_FLAGS)
        if flag.name != "config" and (flag.name in settings.values or not changed)
    ]
    if not rows:
        return "every setting has its default"
    width = max(len(name) for name, _, _ in rows)
    value_width = min(44, max(len(value) for _, value, _ in rows))
    return "\n".join(f"{name:<{width}}  {value:<{value_width}}  {origin}" for name, value, origin in rows)


def _row(flag: Flag, settings: Settings) -> tuple[str, str, str]:
    setting = settings.values.get(flag.name)
    origin = setting.origin if setting else "default"
    return flag.name, _show(flag, settings, setting.value if setting else None), origin


def _show(flag: Flag, settings: Settings, given: Any) -> str:
    if flag.name == "api-key":
        return f"{len(settings.api_keys)} set" if settings.api_keys else "none"
    section, _, attribute = (flag.target or "").partition(".")
    if section == "cli":
        return json.dumps(given) if flag.kind in ("json", "bool") and given is not None else str(given or "-")
    sections = {"engine": settings.engine, "server": settings.server, "tools": settings.server.tools}
    value = getattr(sections[section], attribute)
    if flag.name == "served-model-name" and value == ():
        return "from the model"
    if value is None or value in ((), ""):
        return "auto" if flag.kind in DECIDED or flag.name in DECIDED_TEXT else "-"
    if isinstance(value, bool):
        return str(value).lower()
    if flag.kind == "json" and not isinstance(value, tuple):
        return json.dumps(value)
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value)
    return _WITH_PASSWORD.sub(r"\1***@", str(value)) if flag.name == "response-store" else str(value)
