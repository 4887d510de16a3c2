"""The field ``routed_experts`` of a choice: base64 of a .npy file, as vLLM sends it."""

from __future__ import annotations

import binascii
import io
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from chorale.api.limits import SIZES
from chorale.engine.types import ExpertIds
from chorale.errors import RequestError
from chorale.turns.events import TurnEnded
from chorale.turns.request import TurnRequest
from chorale.turns.routed_experts import routed_experts

_PIECE = 3 * 2**20  # bytes that one call encodes; the call holds the interpreter's lock


def check_experts(turns: Iterable[TurnRequest]) -> None:
    """Raises ``RequestError`` if an answer would contain the routed experts of too many prompt tokens."""
    most = SIZES["routed_experts"].max
    count = sum(
        (len(turn.prompt_token_ids) - turn.sampling.routed_experts_start) * turn.sampling.n
        for turn in turns
        if turn.sampling.routed_experts_start is not None
    )
    if count > most:
        param = "routed_experts_prompt_start"
        message = f"{param}: an answer may contain the experts of {most} prompt tokens x n, not of {count}"
        raise RequestError(message, param=param, code="above_max_value")


def expert_field(turn: TurnRequest, ended: TurnEnded) -> dict[str, Any]:
    """Returns ``{"routed_experts": JSON}``, null if they are not known; {} if the turn does not return them.

    Takes milliseconds for a long prompt: call it in a thread.
    """
    if turn.expert_shape is None:
        return {}
    found = routed_experts(turn, ended)
    return {"routed_experts": None if found is None else _encoded(found)}


def _encoded(ids: ExpertIds) -> msgspec.Raw:
    file = io.BytesIO()
    np.save(file, ids, allow_pickle=False)
    data = file.getbuffer()
    pieces = (data[first : first + _PIECE] for first in range(0, len(data), _PIECE))
    encoded = [binascii.b2a_base64(piece, newline=False) for piece in pieces]
    return msgspec.Raw(b"".join((b'"', *encoded, b'"')))
