"""Digests of token prefixes: the keys under which the prefix index knows a page.

A page's digest covers every token before it, because the keys and values in it depend on them all:
``digest[i] = blake2b(digest[i - 1] + tokens of page i)``. The chain starts at a root made from a secret of
this engine and the request's ``cache_salt``, so equal prompts under different salts never meet, and nobody
outside can search for collisions (128 bits, so accidental ones are out of the question).
"""

from __future__ import annotations

from hashlib import blake2b

DIGEST_SIZE = 16  # bytes


def root_digest(secret: bytes, salt: str) -> bytes:
    """The start of a chain. Equal salts give equal roots within one engine."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), key=secret, digest_size=DIGEST_SIZE).digest()


def extend_chain(chain: list[bytes], root: bytes, tokens: bytes, page_bytes: int) -> None:
    """Append one digest per whole page in ``tokens`` (int32 ids as bytes), in place.

    ``tokens`` starts where the chain ends; a rest shorter than ``page_bytes`` is left out.
    """
    digest = chain[-1] if chain else root
    for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
        digest = blake2b(digest + tokens[start : start + page_bytes], digest_size=DIGEST_SIZE).digest()
        chain.append(digest)
