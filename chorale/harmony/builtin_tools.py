"""The built-in tools as the model was trained to see them in the system message.

These texts are part of the wire format (they must give the same token ids as openai-harmony and the gpt-oss
reference tools), not Chorale's prose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chorale.harmony.messages import ToolDescription, ToolNamespace

_BROWSER = """\
Tool for browsing.
The `cursor` appears in brackets before each browsing display: `[{cursor}]`.
Cite information from the tool using the following format:
`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.
Do not quote more than 10 words directly from the tool output.
sources=web (default: web)"""

_OPEN = """\
Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, \
showing `num_lines` lines.
Valid link ids are displayed with the formatting: `【{id}†.*】`.
If `cursor` is not provided, the most recent page is implied.
If `id` is a string, it is treated as a fully qualified URL associated with `source`.
If `loc` is not provided, the viewport will be positioned at the beginning of the document or centered on \
the most relevant passage, if available.
Use this function without `id` to scroll to a new location of an opened page."""

_PYTHON = """\
Use this tool to execute{kind} Python code in your chain of thought. The code will not be shown to the user. \
This tool should be used for internal reasoning, but not for code that is intended to be visible to the user \
(e.g. when creating plots, tables, or files)."""

_STATEFUL = """\


When you send a message containing Python code to python, it will be executed in a stateful Jupyter notebook \
environment. python will respond with the output of the execution or time out after 120.0 seconds. The drive \
at '/mnt/data' can be used to save and persist user files. Internet access for this session is UNKNOWN. \
Depends on the cluster."""

_STATELESS = """\

When you send a message containing python code to python, it will be executed in a stateless docker \
container, and the stdout of that process will be returned to you. You have to use print statements \
to access the output.

IMPORTANT: Your python environment is not shared between calls. You will have to pass your entire code each \
time."""


def browser_tools() -> ToolNamespace:
    """Returns ``browser.search``, ``browser.open`` and ``browser.find``."""
    search = {
        "query": {"type": "string"},
        "topn": {"type": "number", "default": 10},
        "source": {"type": "string"},
    }
    open_ = {
        "id": {"type": ["number", "string"], "default": -1},
        "cursor": {"type": "number", "default": -1},
        "loc": {"type": "number", "default": -1},
        "num_lines": {"type": "number", "default": -1},
        "view_source": {"type": "boolean", "default": False},
        "source": {"type": "string"},
    }
    find = {"pattern": {"type": "string"}, "cursor": {"type": "number", "default": -1}}
    return ToolNamespace(
        name="browser",
        description=_BROWSER,
        tools=(
            ToolDescription(
                "search",
                "Searches for information related to `query` and displays `topn` results.",
                _object(search, "query"),
            ),
            ToolDescription("open", _OPEN, _object(open_)),
            ToolDescription(
                "find",
                "Finds exact matches of `pattern` in the current page, or the page given by `cursor`.",
                _object(find, "pattern"),
            ),
        ),
    )


def python_tool(*, stateful: bool, note: str = "") -> ToolNamespace:
    """Returns ``python``, which is called with raw code. ``stateful`` must be true of the back end.

    ``note`` is added as a paragraph, for differences from the environment that the model knows.
    """
    text = _PYTHON.format(kind="" if stateful else " STATELESS") + (_STATEFUL if stateful else _STATELESS)
    return ToolNamespace(name="python", description=f"{text}\n\n{note}" if note else text)


def _object(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema | {"required": list(required)} if required else schema
