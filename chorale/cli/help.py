"""Help texts of the commands that share the flag table."""

from __future__ import annotations

import textwrap

from chorale.cli.flags import ENGINE_FLAGS, KNOWN_FLAGS, MODEL_FLAGS, SERVER_FLAGS, TOOL_FLAGS, Flag


def flag_help(command: str, summary: str) -> str:
    """The help page of a command that takes ``chorale serve``'s flags."""
    lines = [
        f"usage: chorale {command} [MODEL] [options]",
        "",
        summary,
        "MODEL is a folder, a hub id such as openai/gpt-oss-20b, or demo (the default).",
    ]
    groups = (
        ("model", MODEL_FLAGS),
        ("engine", ENGINE_FLAGS),
        ("server", SERVER_FLAGS),
        ("tools", TOOL_FLAGS),
    )
    for title, flags in groups:
        lines += ["", f"{title}:"] + [_line(flag) for flag in flags]
    known = ", ".join(flag.name for flag in KNOWN_FLAGS)
    lines += ["", "accepted for vLLM's sake, and not needed:"]
    lines += textwrap.wrap(known, 100, initial_indent="  ", subsequent_indent="  ")
    lines += [
        "",
        "Dashes and underscores are the same; --no-X turns an on/off option off; sizes take k, K, M, GiB.",
    ]
    return "\n".join(lines)


def _line(flag: Flag) -> str:
    shown = f"--{flag.name}"
    if flag.kind == "bool":
        shown = f"--[no-]{flag.name}"
    elif flag.choices:
        shown += " {" + ",".join(flag.choices) + "}"
    else:
        shown += " " + {"list": "A [B ...]", "json": "JSON", "int": "N", "size": "N", "float": "X"}.get(
            flag.kind, "VALUE"
        )
    return f"  {shown:<44} {flag.help}"
