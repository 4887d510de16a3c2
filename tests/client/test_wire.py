"""Messages survive encoding and decoding, and other data is rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chorale.client.base import EngineInfo
from chorale.client.wire import messages as wire
from chorale.engine.types import (
    ChunkTimings,
    EngineStats,
    GenerateRequest,
    SamplingSpec,
    StepOutputs,
    TokenChunk,
    TokenLogprobs,
)
from chorale.errors import ConfigError

REQUEST = GenerateRequest(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    sampling=SamplingSpec(n=2, logit_bias={5: -1.0}, bad_words=((1, 2),), allowed_token_ids=(7,), seed=2**63),
    cache_salt="s",
)
CHUNK = TokenChunk(
    "r",
    1,
    [7],
    finish_reason="stop",
    stop_token_id=7,
    logprobs=[TokenLogprobs(7, -0.5, 1, [7, 8], [-0.5, -1.0])],
    prompt_logprobs=[None, TokenLogprobs(1, -2.0, 3, [], [])],
    timings=ChunkTimings(1.0, 2.0, 3.0, 4.0, 0),
)


INFO = EngineInfo(model="m", max_model_len=5, max_num_seqs=2, startup_seconds={"load": 0.5})


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (wire.decode_to_engine, wire.Submit("e", REQUEST)),
        (wire.decode_to_engine, wire.Abort(["a"], 2)),
        (wire.decode_from_engine, wire.StepMessage("e", StepOutputs([CHUNK], EngineStats(num_running=3)))),
        (wire.decode_heartbeat, wire.Heartbeat(engine_id="e", pid=3, state="ready", info=INFO)),
    ],
)
def test_messages_are_decoded_as_they_were_encoded(decode: Callable[[bytes], Any], message: Any) -> None:
    assert decode(wire.encode(message)) == message


@given(st.binary(max_size=200))
@example(b"\x91\xaa" + 9 * b"\0" + b"\x80")  # a tag that is not UTF-8
@example(b"\x93\xa6submit\xa1e" + 5000 * b"\x91")
def test_garbage_raises_decode_errors_only(data: bytes) -> None:
    for decode in (wire.decode_to_engine, wire.decode_from_engine, wire.decode_heartbeat):
        try:
            decode(data)
        except wire.DECODE_ERRORS:
            continue


def test_an_address_is_a_unix_socket_with_a_bounded_path(tmp_path: Path) -> None:
    assert wire.engine_address("/run/x") == "ipc:///run/x/engine"
    assert wire.heartbeat_address("/run/x") == "ipc:///run/x/beats"
    with pytest.raises(ConfigError, match="too long"):
        wire.engine_address("/run/" + "x" * 100)
