"""What a turn is asked for, beside its prompt and sampling; and what a round of it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chorale.turns.events import ItemKind

if TYPE_CHECKING:
    from chorale.turns.compaction import Compaction
    from chorale.turns.tools.loop import TurnTools


@dataclass(frozen=True, slots=True)
class CallForm:
    """What a call of a client's tool becomes, where it is more than a plain function call.

    ``name`` and ``namespace``: as the client declared them; ``wrapped``: the model writes a JSON object with
    one text, ``input``, and the client is given that text.
    """

    kind: ItemKind
    name: str
    namespace: str | None = None
    wrapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """All of it text level or for the scheduler; decided by the endpoint, read by the choices."""

    request_id: str  # unique among the requests in flight
    function_names: frozenset[str] = frozenset()  # declared and callable; empty: no call is ever reported
    call_forms: Mapping[str, CallForm] = field(default_factory=dict)  # of those that are no plain functions
    stop: tuple[str, ...] = ()  # stop strings, on final text only
    min_tokens: int = 0  # no stop string ends the turn before it has more tokens
    include_stop: bool = False  # the stop string (or extra stop token) is part of the text
    parallel_tool_calls: bool = True  # False: the turn ends after the first call
    stream_interval: int = 1  # tokens per wake-up after the first
    # The header (after <|start|>assistant) that the prompt already ends with: the model goes on from there.
    prefill_token_ids: tuple[int, ...] = ()
    ensure_answer: bool = True  # force a final message when the model ended after its analysis
    ignore_eos: bool = False  # what follows <|return|> is read on, as if the turn went on
    progress: bool = False  # emit TurnProgress
    priority: int = 0
    cache_salt: str = ""
    arrival_time: float = 0.0
    tools: tuple[TurnTools, ...] = ()  # the built-in tools: none, or one entry a choice
    compaction: Compaction | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """The next generation of a turn: its prompt, and the header that the prompt ends with.

    ``num_own_tokens``: how many tokens at the prompt's end the round's grammar covers.
    ``num_new_tokens``: after a tool, what of the prompt was in no round before; the round has a grammar of
    its own. None: no tool ran, and the grammar goes on.
    """

    prompt_token_ids: list[int]
    prefill_token_ids: tuple[int, ...]
    num_own_tokens: int = 0
    num_new_tokens: int | None = None
