"""The owner of a request, its API key: owners share the engine fairly, and each has a prefix-cache salt.

The salt keeps requests of different API keys from sharing cached pages. Otherwise a client could probe other
clients' prompts: ``cached_tokens`` and the time to the first token reveal whether a prompt prefix has been
computed before.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar

# The digest of the current request's API key, b"" without keys. Tasks that the request starts inherit it.
CALLER: ContextVar[bytes] = ContextVar("chorale_caller", default=b"")


def cache_salt(owner: bytes, asked: str | None) -> str:
    """Combines the owner with the client's salt.

    ``owner``: the API key's digest, empty on a server without keys. ``asked``: the request's ``cache_salt``,
    which separates requests with the same key.
    """
    salt = asked or ""
    if not owner:
        return salt
    return hashlib.sha256(
        b"chorale prefix cache\0" + owner + salt.encode("utf-8", "surrogatepass")
    ).hexdigest()
