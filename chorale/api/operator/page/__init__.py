"""``/``: the chat page. Its files are in ``static``; nothing is loaded from another server.

The content security policy allows scripts, styles and fonts from this server only, and none within the page,
so model output can never run as code. The address of a static file contains a hash of all of them, so a
browser keeps it until the server is updated.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache, partial
from pathlib import Path, PurePosixPath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorale.api.http.auth import PAGE_PATHS
from chorale.api.http.responses import json_response
from chorale.api.state import ServerState
from chorale.errors import NotFoundError
from chorale.tools.options import BUILT_IN_SAMPLE, COMPILING

_STATIC = Path(__file__).parent / "static"
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
_PYTHON_EXAMPLE = "What is 48213 * 9177?"  # sent with only that tool enabled
_COMPILING = "The Python interpreter is being compiled, once after its installation."
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8", ".woff2": "font/woff2",
}  # fmt: skip


def routes(state: ServerState) -> list[Route]:
    index, of_server, static = PAGE_PATHS
    return [Route(index, page), Route(of_server, partial(settings, state)), Route(static, serve)]


async def page(request: Request) -> Response:
    """Returns the page."""
    body = _read("index.html").replace(b"static/", b"static/" + version().encode() + b"/")
    headers = {
        "content-type": _TYPES[".html"],
        "content-security-policy": _POLICY,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-frame-options": "DENY",
    }
    return Response(body, headers=headers)


async def serve(request: Request) -> Response:
    """Returns a static file. One of another version may be needed by a page that is still open."""
    name, asked = request.path_params["file"], request.path_params["version"]
    if name not in _names():
        raise NotFoundError("unknown path", code="unknown_url")
    plain, packed = load(name)
    headers = {
        "content-type": _TYPES[PurePosixPath(name).suffix],
        "cache-control": "public, max-age=31536000, immutable" if asked == version() else "no-cache",
        "vary": "accept-encoding",
    }
    if packed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, headers={**headers, "content-encoding": "gzip"})
    return Response(plain, headers=headers)


async def settings(state: ServerState, request: Request) -> Response:
    """Returns what the page needs before the user has entered a key, and why a tool waits."""
    tools, is_demo = _tools(state), "demo" in state.model_names
    examples: list[dict[str, object]] = [
        {"text": text, "tool": None} for text in (DEMO_EXAMPLES if is_demo else EXAMPLES)
    ]
    if any(tool["id"] == "code_interpreter" for tool in tools):
        examples.append({"text": _PYTHON_EXAMPLE, "tool": "code_interpreter"})
    body = {
        "about": _ABOUT_DEMO if is_demo else _ABOUT,
        "examples": examples,
        "tools": tools,
        "max_body_bytes": state.config.max_body_bytes,
    }
    return json_response(body, headers={"cache-control": "no-store"})


def _tools(state: ServerState) -> list[dict[str, object]]:
    """Returns the server's tools; ``tool`` is what a request declares, ``waiting`` why a call would wait."""
    found: list[dict[str, object]] = []
    for name, line in ({} if state.tools is None else state.tools.available).items():
        if name == "browser":
            is_sample = BUILT_IN_SAMPLE in line
            found.append({
                "id": "web_search", "tool": {"type": "web_search"},
                "name": "Web search (offline sample)" if is_sample else "Web search",
                "about": "The model may search a few built-in sample pages, not the web." if is_sample
                else "The model may search the web, open pages and cite them.",
            })  # fmt: skip
        elif name == "python":
            found.append({
                "id": "code_interpreter", "tool": {"type": "code_interpreter", "container": {"type": "auto"}},
                "name": "Python", "about": "The model may run Python on the server.",
                "waiting": _COMPILING if COMPILING in line else None,
            })  # fmt: skip
        elif name != "mcp":
            found.append({
                "id": name, "tool": {"type": "mcp", "server_label": name, "require_approval": "never"},
                "name": name, "about": "The model may use this MCP server's tools.",
            })  # fmt: skip
    return found


@cache
def version() -> str:
    """Returns a hash of all static files."""
    digest = hashlib.sha256()
    for name in sorted(_names()):
        digest.update(name.encode() + b"\0" + _read(name))
    return digest.hexdigest()[:16]


@cache
def _names() -> frozenset[str]:
    """Returns the paths of the files that may be served."""
    paths = (path for path in _STATIC.rglob("*") if path.suffix in _TYPES)
    return frozenset(path.relative_to(_STATIC).as_posix() for path in paths)


@cache
def load(name: str) -> tuple[bytes, bytes | None]:
    """Returns the bytes of a file, and those compressed with gzip unless its format is compressed."""
    plain = _read(name)
    return plain, None if name.endswith(".woff2") else gzip.compress(plain, mtime=0)


@cache
def _read(name: str) -> bytes:
    return (_STATIC / name).read_bytes()
