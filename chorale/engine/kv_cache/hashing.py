"""Hashes of token prefixes: the keys of blocks in the prefix index.

A block's hash covers every token before it, because its keys and values depend on them all:
``hash[i] = blake2b(hash[i - 1] + tokens of block i)``. The chain starts at a root made from a secret of this
engine, the request's ``cache_salt`` and its adapter, so equal prompts under different salts or weights never
share a block, and no client can search for collisions. With 128 bits, accidental collisions can be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

HASH_SIZE = 16  # bytes
FIXED_SECRET = b"chorale"  # default secret of engines whose hashes others must know


def shared_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret for engines whose hashes must be equal in other processes and after a restart.

    It is made from ``CHORALE_PREFIX_SECRET``, else from ``PYTHONHASHSEED``, which vLLM uses for this, else
    from a constant.
    """
    seed = environment.get("PYTHONHASHSEED", "")
    given = environment.get("CHORALE_PREFIX_SECRET") or ("" if seed == "random" else seed)
    return blake2b(given.encode("utf-8", "surrogateescape") or FIXED_SECRET, digest_size=HASH_SIZE).digest()


def root_hash(secret: bytes, salt: str) -> bytes:
    """Return the start of a chain. Equal salts give equal roots within one engine."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), key=secret, digest_size=HASH_SIZE).digest()


def salted_root(secret: bytes, cache_salt: str, adapter_id: int = 0) -> bytes:
    """Return the start of the chains of all requests with this ``cache_salt`` and adapter (0: none)."""
    return root_hash(secret, f"adapter:{adapter_id}:{cache_salt}" if adapter_id else "salt:" + cache_salt)


def extend_chain(chain: list[bytes], root: bytes, tokens: bytes, block_bytes: int) -> None:
    """Append one hash for each whole block in ``tokens`` (int32 ids as bytes), in place.

    ``tokens`` starts where the chain ends; a remainder shorter than ``block_bytes`` is left out.
    """
    last = chain[-1] if chain else root
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        last = blake2b(last + tokens[start : start + block_bytes], digest_size=HASH_SIZE).digest()
        chain.append(last)
