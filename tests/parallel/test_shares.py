"""Which heads, columns, experts and token ids each rank owns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorale.config.engine import EngineConfig
from chorale.errors import ConfigError
from chorale.model.config import ModelConfig
from chorale.model.config_writer import SHAPES, make_config
from chorale.parallel.shares import CHUNK, cut, make_shares, shares_of


def model(**sizes: Any) -> ModelConfig:
    return make_config(**{**SHAPES["120b"], **sizes})


def columns(size: int, **sizes: Any) -> list[int]:
    return [len(share.columns) // CHUNK for share in make_shares(model(**sizes), size)]


def test_the_experts_of_gpt_oss() -> None:
    assert columns(1) == [45]
    assert columns(2) == [23, 22]
    assert columns(4) == [12, 11, 11, 11]
    assert columns(8) == [6, 6, 6, 5, 6, 5, 6, 5]


def test_heads_and_token_ids_of_gpt_oss() -> None:
    first, second, *_, last = make_shares(model(), 4)
    assert (first.heads, first.kv_heads) == (range(16), range(2))
    assert (second.heads, second.kv_heads) == (range(16, 32), range(2, 4))
    assert [len(share.vocabulary) for share in (first, second, last)] == [50304, 50240, 50240]
    assert last.vocabulary == range(150848, 201088)
    assert first.columns.stop == second.columns.start


def test_whole_experts() -> None:
    shares = make_shares(model(experts=10), 4, by_expert=True)
    assert [len(share.experts) for share in shares] == [3, 2, 3, 2]
    assert {share.columns for share in shares} == {range(2880)}


def test_chunks_of_an_mxfp4_group_where_64_does_not_divide() -> None:
    assert [share.columns for share in make_shares(model(inter=96), 2)] == [range(64), range(64, 96)]


@pytest.mark.parametrize(
    ("size", "sizes", "said"),
    [
        (0, {}, "--tensor-parallel-size 0: must be one of 1, 2, 4, 8"),
        (4, {"inter": 96}, "too few columns of the experts"),
        (8, {"vocab": 256}, "too few token ids"),
    ],
)
def test_sizes_that_cannot_be(size: int, sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_shares(model(**sizes), size)


@given(st.integers(1, 10_000), st.integers(1, 8), st.sampled_from([1, 32, 64]))
def test_nothing_is_padded_or_left_out(total: int, parts: int, chunk: int) -> None:
    if -(-total // chunk) < parts:
        with pytest.raises(ConfigError):
            cut(total, parts, chunk, "things")
        return
    found = cut(total, parts, chunk, "things")
    assert list(itertools.chain(*found)) == list(range(total))
    chunks = [-(-len(part) // chunk) for part in found]
    assert chunks[0] == max(chunks) <= min(chunks) + 1
    if parts in (2, 4, 8):  # a part is that of two of the parts of twice as many
        halves = cut(total, parts // 2, chunk, "things")
        assert [part.start for part in found[::2]] == [part.start for part in halves]
    assert all(part.start % chunk == 0 for part in found)


@pytest.mark.parametrize(("asked", "whole"), [(None, False), (False, False), (True, True)])
def test_the_way_in_which_experts_are_cut(asked: bool | None, whole: bool) -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, enable_expert_parallel=asked)
    assert [share.by_expert for share in shares_of(config, model())] == [whole, whole]


def test_one_rank_has_all_of_all_experts() -> None:
    (only,) = shares_of(EngineConfig(model="m", enable_expert_parallel=True), model())
    assert not only.by_expert
    assert len(only.experts) == only.num_experts
