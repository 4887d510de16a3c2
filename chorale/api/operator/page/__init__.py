"""``/``: the chat page, a single file that makes no external requests.

The content security policy allows only the page's own script and style, by hash, so model output can never
run as code. The page builds DOM nodes from text only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache, partial
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorale.api.state import ServerState

_SLOT = 'id="settings">{}'
EXAMPLES = ("What can you do?", "Write a haiku about the sea.", "Explain how a rainbow forms.")
# Prompts that the demo model answers correctly without tools; tests/acceptance/e2e/test_demo.py checks each.
DEMO_EXAMPLES = (
    "What can you do?",
    "What is 2 + 3 * 4?",
    "Sort these numbers: 31, 4, 15",
    "Reverse the word hello",
    "Is this review positive or negative: The pizza was great!",
    "Give me a JSON object with name and age for Anna, 31",
    "Wer bist du?",
)
_ABOUT = "Models can make mistakes."
_ABOUT_DEMO = (
    "This is the demo, a small model trained on synthetic examples: arithmetic with small numbers, lists, "
    "words letter by letter, sentiment, extraction, JSON and function calls. It knows no facts about the "
    "world, and it can be wrong."
)
_TOOL_EXAMPLES = {"code_interpreter": "What is 48213 * 9177?"}  # sent with only that tool enabled
_TOOL_NAMES = {"web_search": "Web search", "code_interpreter": "Python"}
_TOOL_WORDS = {
    "web_search": "The model may search the web, open pages and cite them.",
    "code_interpreter": "The model may run Python on the server.",
}


def routes(state: ServerState) -> list[Route]:
    return [Route("/", partial(page, state))]


async def page(state: ServerState, request: Request) -> Response:
    """Returns the page with this server's settings filled in."""
    text, policy = _template()
    body = text.replace(_SLOT, _SLOT[:-2] + _as_data(settings(state)), 1).encode()
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-frame-options": "DENY",
    }
    return Response(body, headers=headers)


def settings(state: ServerState) -> dict[str, object]:
    """Returns the settings that the page needs before the user has entered a key."""
    tools = _tools(state)
    asked = [
        {"text": _TOOL_EXAMPLES[kind], "tool": _TOOL_NAMES[kind]}
        for kind, _ in tools
        if kind in _TOOL_EXAMPLES
    ]
    is_demo = "demo" in state.model_names
    return {
        "about": _ABOUT_DEMO if is_demo else _ABOUT,
        "examples": [
            *({"text": text, "tool": None} for text in (DEMO_EXAMPLES if is_demo else EXAMPLES)),
            *asked,
        ],
        "tools": [
            {"name": _TOOL_NAMES[kind], "about": _TOOL_WORDS[kind], "tool": tool} for kind, tool in tools
        ],
    }


def _tools(state: ServerState) -> list[tuple[str, dict[str, object]]]:
    available = {} if state.tools is None else state.tools.available
    found: list[tuple[str, dict[str, object]]] = []
    if "browser" in available:
        found.append(("web_search", {"type": "web_search"}))
    if "python" in available:
        found.append(("code_interpreter", {"type": "code_interpreter", "container": {"type": "auto"}}))
    return found


def _as_data(value: object) -> str:
    """Encodes a value as JSON that cannot close the script element around it."""
    return json.dumps(value).replace("<", "\\u003c")


@cache
def _template() -> tuple[str, str]:
    """Returns the page and its content policy."""
    text = files(__package__).joinpath("index.html").read_text("utf-8")
    style, script = (_hash(text, tag) for tag in ("style", "script"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _hash(text: str, tag: str) -> str:
    inner = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert len(inner) == 1, tag
    digest = hashlib.sha256(inner[0].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
