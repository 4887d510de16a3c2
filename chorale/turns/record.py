"""What a turn sampled, for ``include_record``: prompts, parameters, tokens and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from chorale.config.seeds import choice_seed
from chorale.engine.types import GenerateRequest, TokenChunk

LEAST = -9999.0  # JSON has no -inf


@dataclass(slots=True)
class Round:
    """One generation of one choice."""

    choice: int
    request: GenerateRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def object(self, first_choice: int) -> dict[str, Any]:
        """Returns the round of a record. Its sampling is that of one choice; empty options are left out."""
        spec = self.request.sampling
        seed = None if spec.seed is None else choice_seed(spec.seed, self.choice)
        own = msgspec.structs.asdict(msgspec.structs.replace(spec, n=1, seed=seed))
        given = {name: value for name, value in own.items() if value not in (None, "", (), {})}
        return {
            "choice": first_choice + self.choice,
            "prompt_token_ids": self.request.prompt_token_ids,
            "sampling": msgspec.to_builtins(given, str_keys=True),
            "output_token_ids": self.token_ids,
            "logprobs": self.logprobs,
        }


class Recorder:
    """Collects the rounds of a turn, in the order of their first tokens."""

    def __init__(self) -> None:
        self.rounds: dict[tuple[str, int], Round] = {}

    def add(self, request: GenerateRequest, choice: int, chunk: TokenChunk) -> None:
        """``choice``: the number of the turn's choice, which the chunk of a later round does not have."""
        key = request.request_id, choice
        found = self.rounds.get(key) or self.rounds.setdefault(key, Round(choice, request))
        found.token_ids += chunk.token_ids
        found.logprobs += [max(each.logprob, LEAST) for each in chunk.logprobs or ()]
