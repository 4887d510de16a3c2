"""The seeds of a request's choices."""

from __future__ import annotations

import hashlib

SEED_BITS = 63  # seeds fit a signed 64-bit integer on the device
_SEED_MASK: int = 2**SEED_BITS - 1


def choice_seed(seed: int, index: int) -> int:
    """Returns the seed of choice ``index`` of a request.

    It is a hash, so that requests with neighbouring seeds share no choices.
    """
    if index == 0:
        return seed & _SEED_MASK
    digest = hashlib.blake2b(b"%d %d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SEED_MASK
