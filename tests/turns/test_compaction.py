"""How long a summary may be: a checkpoint's own default bounds it, as it bounds an answer."""

from __future__ import annotations

from chorale.client.base import EngineInfo
from chorale.engine.types import SamplingSpec
from chorale.turns.compaction import MAX_TOKENS, most_tokens, sampling_of_pass


def test_the_checkpoints_default_bounds_a_summary() -> None:
    info = EngineInfo(model="m", max_model_len=131072, max_num_seqs=4)
    small = EngineInfo(
        model="m", max_model_len=131072, max_num_seqs=4, default_sampling={"max_new_tokens": 300.0}
    )
    assert most_tokens(info) == MAX_TOKENS
    assert most_tokens(small) == 300
    spec = SamplingSpec(max_tokens=5)  # the request's own limit is not the summary's
    for each, expected in ((info, MAX_TOKENS), (small, 300)):
        sampling = sampling_of_pass(spec, each, 1000)
        assert sampling.max_tokens == expected
