"""The routed experts of a choice as an array: which experts the router chose at each position and layer.

There is one position for each token of the prompt, from ``routed_experts_start`` on, and for each token of
the output but the last, which the model has not read. Trainers replay them.
"""

from __future__ import annotations

import numpy as np

from chorale.engine.types import ExpertIds
from chorale.turns.events import TurnEnded
from chorale.turns.request import TurnRequest


def routed_experts(turn: TurnRequest, ended: TurnEnded) -> ExpertIds | None:
    """Returns [positions, layers, experts per token], read only; expert ids in the order of their gates.

    Returns None if the turn did not ask for them, if nothing was computed, or if the server added tokens to
    the output, as it does after a built-in tool or to force an answer: positions would not match tokens.
    """
    start = turn.sampling.routed_experts_start
    if turn.expert_shape is None or start is None or not ended.routed_experts:
        return None
    found = np.frombuffer(b"".join(ended.routed_experts), np.uint8).reshape(-1, *turn.expert_shape)
    # The engine may have sampled tokens after a stop string.
    num_positions = len(turn.prompt_token_ids) + max(len(ended.output_token_ids), 1) - 1
    return found[: num_positions - start]
