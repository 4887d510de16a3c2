"""Routed experts when another engine continues a request. All simulations check those of each prefix."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from chorale.client.continuation import continued, without_repeated
from chorale.engine.types import GenerateRequest, SamplingSpec
from tests.support.engine.fake_executor import FakeModel, fake_experts
from tests.support.engine.recording import Engine

SHAPE = (2, 4)  # of ``fake_experts``


def test_a_start_outside_the_prompt_is_refused() -> None:
    engine = Engine(routed_experts=SHAPE)
    engine.add("a", [1, 2, 3], routed_experts_start=4)
    (chunk,) = engine.run()
    assert chunk.finish_reason == "error"
    assert "routed_experts_start" in (chunk.error or "")


@pytest.mark.parametrize("penalty", [0.0, 0.5])  # with a penalty, delivered tokens are computed again
@pytest.mark.parametrize("num_delivered", [0, 1, 6])
def test_another_engine_continues_where_the_lost_one_stopped(penalty: float, num_delivered: int) -> None:
    prompt = list(range(10, 40))
    spec = SamplingSpec(
        n=2, seed=1, max_tokens=12, ignore_eos=True, presence_penalty=penalty, routed_experts_start=5
    )
    asked = GenerateRequest(request_id="a", prompt_token_ids=prompt, sampling=spec)
    lost, other = Engine(routed_experts=SHAPE), Engine(routed_experts=SHAPE)
    lost.core.add_request(asked)
    chunks = [chunk for chunk in lost.run() if chunk.index == 1][:num_delivered]
    delivered = [token for chunk in chunks for token in chunk.token_ids]
    rest = continued(asked, 1, delivered, "b", began=bool(chunks))
    assert rest is not None
    other.core.add_request(rest.request)
    again: Sequence[int] = rest.again
    for chunk in other.run():
        kept = without_repeated(msgspec.structs.replace(chunk, index=1), again)
        assert kept is not None
        again = kept[1]
        chunks.append(kept[0])
    tokens = prompt + [token for chunk in chunks for token in chunk.token_ids]
    found = b"".join(part for chunk in chunks for part in chunk.routed_experts or ())
    hashes = FakeModel().prefix_hashes(np.array(tokens[:-1], np.int32))
    assert (len(tokens), found) == (42, fake_experts(hashes[5:]).tobytes())
