"""From a chat turn's tokens to what the user reads: reasoning, answer, calls."""

from __future__ import annotations

from collections.abc import Iterable

from chorale.harmony.messages import ContentDelta, MessageStart
from chorale.harmony.parser import Parser
from chorale.harmony.text import StopStrings
from chorale.harmony.vocab import Vocabulary
from chorale.llm.outputs import CompletionOutput, ToolCall
from chorale.llm.params import SamplingParams
from chorale.turns.tools.functions import Function

_FUNCTIONS = "functions."
Piece = tuple[str, bool]  # of a text, and whether a stop string that ends in it counts


def read_turn(
    output: CompletionOutput, params: SamplingParams, tools: Iterable[Function], vocab: Vocabulary
) -> None:
    """Fill ``reasoning``, ``text`` and ``tool_calls`` from ``output.token_ids``.

    Preambles (commentary for the user) stand before the final text. A stop string has ended the turn already
    (it counts wherever it appears); here it is cut from the text in which it stands, as is a stop token.
    """
    parser = Parser(vocab, tool_names=[f"{_FUNCTIONS}{tool.name}" for tool in tools])
    reasoning: list[Piece] = []
    text: list[Piece] = []
    calls: list[tuple[str, list[Piece]]] = []
    target: list[Piece] = text
    token_ids = _shown(output, params, vocab)
    early = parser.feed_all(token_ids[: params.min_tokens])
    late = [*parser.feed_all(token_ids[params.min_tokens :]), *parser.finish()]
    for event, counts in [*((event, False) for event in early), *((event, True) for event in late)]:
        if isinstance(event, MessageStart):
            target = text
            if event.recipient is not None:
                target = []
                calls.append((event.recipient.removeprefix(_FUNCTIONS), target))
            elif event.channel == "analysis":
                target = reasoning
        elif isinstance(event, ContentDelta):
            target.append((event.text, counts))
    output.text = _until_stop(text, params)
    output.reasoning = _until_stop(reasoning, params) or None
    output.tool_calls = [ToolCall(name, "".join(text for text, _ in pieces)) for name, pieces in calls]


def _shown(output: CompletionOutput, params: SamplingParams, vocab: Vocabulary) -> list[int]:
    """Without an extra stop token, unless that is wanted. A special one is no text, and may end a message."""
    stop = output.stop_reason
    if params.include_stop_str_in_output or not isinstance(stop, int) or vocab.is_special(stop):
        return output.token_ids
    return output.token_ids[:-1]


def _until_stop(pieces: list[Piece], params: SamplingParams) -> str:
    stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
    shown = [stops.feed(text)[0] if counts else stops.pass_over(text) for text, counts in pieces]
    return "".join(shown) + stops.flush()
