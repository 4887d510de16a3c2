"""/docs: interactive API documentation with Swagger UI (vendored by ``scripts/vendor_docs_page.py``).

All files come from this server, and the content security policy allows nothing else. The large
ones are stored compressed. Each is read on first use.
"""

from __future__ import annotations

import gzip
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorale.api.http.auth import DOCS_PATHS

if TYPE_CHECKING:
    from chorale.api.state import ServerState  # the command line imports this module without a server

# Swagger UI sets style attributes on SVGs, and its style sheet contains images as data URLs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


def routes(state: ServerState) -> list[Route]:
    if state.config.disable_docs:
        return []
    return [Route(path, partial(serve, path.rpartition("/")[2])) for path in DOCS_PATHS]


async def serve(name: str, request: Request) -> Response:
    if name == "docs":
        name = "index.html"
    headers = {
        "content-type": f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8",
        "content-security-policy": _POLICY,
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache" if name == "index.html" else "max-age=3600",
        "vary": "accept-encoding",
    }
    plain, packed = load(name)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, headers={**headers, "content-encoding": "gzip"})
    return Response(plain, headers=headers)


@cache
def load(name: str) -> tuple[bytes, bytes]:
    """Returns the bytes of a file, plain and compressed with gzip."""
    folder = files(__package__)
    kept = folder.joinpath(f"{name}.gz")
    if kept.is_file():
        packed = kept.read_bytes()
        return gzip.decompress(packed), packed
    plain = folder.joinpath(name).read_bytes()
    return plain, gzip.compress(plain, mtime=0)
