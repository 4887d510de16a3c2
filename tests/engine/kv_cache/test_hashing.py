"""Prefix block_hashes: what must differ differs, and chunks chain like the whole."""

from __future__ import annotations

import numpy as np

from chorale.engine.kv_cache.hashing import extend_chain, root_hash


def chain(tokens: list[int], block: int, root: bytes = b"root") -> list[bytes]:
    block_hashes: list[bytes] = []
    extend_chain(block_hashes, root, np.array(tokens, np.int32).tobytes(), 4 * block)
    return block_hashes


def test_a_rest_shorter_than_a_block_has_no_digest() -> None:
    assert len(chain([1, 2, 3, 4, 5], 2)) == 2
    assert chain([1], 2) == []


def test_a_digest_depends_on_everything_before_it() -> None:
    assert chain([1, 2, 3, 4], 2)[1] != chain([9, 2, 3, 4], 2)[1]
    assert chain([1, 2], 2) != chain([1, 2], 2, b"other")


def test_extending_in_parts_equals_the_whole() -> None:
    whole, parts = chain(list(range(12)), 3), []
    for start in range(0, 12, 6):
        extend_chain(parts, b"root", np.arange(start, start + 6, dtype=np.int32).tobytes(), 12)
    assert parts == whole


def test_roots_differ_by_salt_and_secret_and_take_any_text() -> None:
    secret = b"s" * 16
    assert root_hash(secret, "a") == root_hash(secret, "a")
    assert len({root_hash(secret, "a"), root_hash(secret, "b"), root_hash(b"t" * 16, "a")}) == 3
    assert root_hash(secret, "\ud800")  # a lone surrogate out of a client's JSON
