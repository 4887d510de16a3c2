"""The salt of a request's prefix cache: requests of different API keys never share a page of it.

Without this a caller could test what another one has sent: ``cached_tokens`` and the time to the first token
tell whether a prompt, or its beginning, was read before.
"""

from __future__ import annotations

import hashlib


def cache_salt(owner: bytes, asked: str | None) -> str:
    """``owner``: the digest of the API key, of fixed length; empty on a server without keys.

    ``asked``: the client's own ``cache_salt``, which divides what is shared under one key further.
    """
    salt = asked or ""
    if not owner:
        return salt
    return hashlib.sha256(
        b"chorale prefix cache\0" + owner + salt.encode("utf-8", "surrogatepass")
    ).hexdigest()
