"""Messages survive encoding and decoding, and other data is rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chorale.client.wire import messages as wire
from chorale.errors import ConfigError


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
