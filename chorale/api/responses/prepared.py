"""Prompt and Prepared: the encoded prompt of a request, and the turn to run."""

from __future__ import annotations

from dataclasses import dataclass

from chorale.api.responses.tools import ToolSet
from chorale.harmony.messages import ReasoningEffort
from chorale.store.protocol import StoredItem
from chorale.turns.built_in.open import ApprovedCall, TurnTools, close_tools
from chorale.turns.compaction import Compaction
from chorale.turns.request import TurnRequest
from chorale.turns.rules import TurnRules


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    tools: ToolSet
    rules: TurnRules
    input: tuple[StoredItem, ...]  # items of this request, as they are stored
    effort: ReasoningEffort
    history: tuple[StoredItem, ...] = ()  # items of the conversation before this request
    built_in: tuple[TurnTools, ...] = ()  # closed by the turn
    approved: tuple[ApprovedCall, ...] = ()
    compaction: Compaction | None = None
    prefill: tuple[int, ...] = ()  # header of the open message that ends the prompt

    async def close(self) -> None:
        """Closes the tools of a prompt that is not submitted."""
        await close_tools(self.built_in)


@dataclass(frozen=True, slots=True)
class Prepared:
    prompt: Prompt
    turn: TurnRequest  # its request_id is the response's id
