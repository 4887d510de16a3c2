"""The search for a prompt's hit has the same result as the engine's look-up, for any slice size."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorale.client.routing.prefix_index import PrefixIndex, PrefixSearch
from chorale.engine.kv_cache.cache import BlockTables, HybridCache
from chorale.engine.kv_cache.hashing import extend_chain, salted_root
from chorale.engine.types import CacheGroup, GenerateRequest, SamplingSpec
from tests.engine.kv_cache.test_index_log import Tokens

BLOCK, WINDOW = 4, 10
SECRET = b"0123456789abcdef"


def chain(prompt: list[int], secret: bytes = SECRET, salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    tokens = b"".join(token.to_bytes(4, "little") for token in prompt)
    extend_chain(hashes, salted_root(secret, salt), tokens, 4 * BLOCK)
    return hashes


def engine_hit(cache: HybridCache, prompt: list[int], secret: bytes = SECRET) -> int:
    """Return the hit that ``Scheduler`` would find: the last token is always computed."""
    return BLOCK * cache.lookup(chain(prompt, secret)[: (len(prompt) - 1) // BLOCK])


def filled(seed: int, secret: bytes = SECRET) -> HybridCache:
    """Return a small cache after prompts with few different prefixes, some of whose blocks were evicted."""
    draw, cache = random.Random(seed), HybridCache(60, BLOCK, WINDOW)
    for _ in range(draw.randint(0, 12)):
        prompt = family(draw)
        hashes, tables = chain(prompt, secret), BlockTables()
        hit = cache.lookup(hashes[: (len(prompt) - 1) // BLOCK])
        if cache.blocks_to_admit(hashes, hit, len(prompt)) > cache.pool.num_free:
            continue
        cache.attach_prefix(tables, hashes, hit)
        for end in range(hit * BLOCK + 3, len(prompt) + 3, 3):
            cache.grow(tables, min(end, len(prompt)))
            cache.commit(tables, min(end, len(prompt)), hashes, Tokens())
        cache.release(tables)
    return cache


def family(draw: random.Random) -> list[int]:
    """Return a prompt that shares its beginning with others."""
    base = [draw.randrange(2)] * draw.randint(1, 40)
    return base + [draw.randrange(3) for _ in range(draw.randint(0, 12))]


def index_of(cache: HybridCache, secret: bytes = SECRET) -> PrefixIndex:
    return PrefixIndex(cache.index_state(secret))


def asked(prompt: list[int], **fields: object) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_token_ids=prompt, **fields)  # type: ignore[arg-type]


def search(request: GenerateRequest, indexes: list[PrefixIndex | None], size: int = 512) -> list[int]:
    found = PrefixSearch(request, indexes)
    for _ in range(1000):
        if found.advance(size):
            return found.hits()
    raise AssertionError("the search does not end")


@given(st.integers(0, 10**6), st.integers(1, 9), st.booleans())
def test_the_search_finds_the_same_hits_as_the_engines(seed: int, size: int, own_secret: bool) -> None:
    other = b"another" if own_secret else SECRET
    caches = [filled(seed), filled(seed + 1, other), filled(seed + 2)]
    indexes: list[PrefixIndex | None] = [
        index_of(caches[0]), index_of(caches[1], other), None, index_of(caches[2])
    ]  # fmt: skip
    draw = random.Random(seed)
    for _ in range(5):
        prompt = family(draw)
        one, two, three = (
            engine_hit(c, prompt, s) for c, s in zip(caches, (SECRET, other, SECRET), strict=True)
        )
        assert search(asked(prompt), indexes, size) == [one, two, 0, three]


def test_random_prompts_have_whole_hits_and_hits_shortened_by_the_window() -> None:
    """Otherwise the property test above would prove nothing."""
    whole = cut = 0
    for seed in range(200):
        cache, draw = filled(seed), random.Random(seed)
        for _ in range(5):
            prompt = family(draw)
            full, hashes = cache.pool.published(CacheGroup.FULL), chain(prompt)[: (len(prompt) - 1) // BLOCK]
            end = next((i for i, each in enumerate(hashes) if each not in full), len(hashes))
            hit = engine_hit(cache, prompt) // BLOCK
            whole += bool(end) and hit == end
            cut += hit < end
    assert whole > 50
    assert cut > 5


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, int]]:
    """The root and the number of blocks of each batch that is hashed."""
    found: list[tuple[bytes, int]] = []

    def counted(hashes: list[bytes], root: bytes, tokens: bytes, block_bytes: int) -> None:
        found.append((root, len(tokens) // block_bytes))
        extend_chain(hashes, root, tokens, block_bytes)

    monkeypatch.setattr("chorale.client.routing.prefix_index.extend_chain", counted)
    return found


def test_hashing_stops_at_the_first_batch_that_no_index_has(hashed: list[tuple[bytes, int]]) -> None:
    index = index_of(HybridCache(60, BLOCK, WINDOW))
    assert search(asked([1] * 100_000), [index, index]) == [0, 0]
    assert sum(blocks for _, blocks in hashed) == 4


def test_indexes_with_equal_secrets_are_hashed_once(hashed: list[tuple[bytes, int]]) -> None:
    cache = HybridCache(60, BLOCK, WINDOW)
    search(asked([1] * 9), [index_of(cache), index_of(cache), index_of(cache, b"other")])
    assert [root for root, _ in hashed] == [salted_root(SECRET, ""), salted_root(b"other", "")]


def test_other_salts_and_prompt_logprobs_have_no_hit() -> None:
    cache = HybridCache(60, BLOCK, WINDOW)
    prompt, tables = [1] * 21, BlockTables()
    cache.grow(tables, 21)
    cache.commit(tables, 21, chain(prompt, salt="mine"), Tokens())
    index = index_of(cache)
    assert search(asked(prompt, cache_salt="mine"), [index]) == [20]
    assert search(asked(prompt, cache_salt="yours"), [index]) == [0]
    assert search(asked(prompt), [index]) == [0]
    scored = SamplingSpec(prompt_logprobs=0)  # the engine computes all of it
    assert search(asked(prompt, cache_salt="mine", sampling=scored), [index]) == [0]


@pytest.mark.parametrize("prompt", [[], [1], [1] * 4, [2**40] * 50, [-(2**33)] * 50])
def test_prompts_without_a_whole_block_or_with_invalid_ids_have_no_hit(prompt: list[int]) -> None:
    assert search(asked(prompt), [index_of(HybridCache(60, BLOCK, WINDOW))]) == [0]


def test_an_index_without_a_secret_has_no_hits() -> None:
    cache = filled(3)
    index = PrefixIndex(cache.index_state(b""))
    assert search(asked([0] * 30), [index]) == [0]
