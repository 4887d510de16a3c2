"""What a choice says that it needs next; fed whole it gives what it gives token by token.

No engine and no event loop: a choice is driven by hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorale.engine.types import FinishReason, SamplingSpec, TokenChunk, TokenLogprobs
from chorale.errors import EngineError
from chorale.harmony.messages import ToolDescription
from chorale.harmony.vocab import CALL, RETURN
from chorale.tools.contract import CodeInterpreterRequest, CodeOutput, McpRequest, RequestTools, ToolResult
from chorale.turns.built_in.open import ApprovedCall, TurnTools, built_in_tools
from chorale.turns.choice.choice import Choice
from chorale.turns.choice.raw_choice import RawChoice
from chorale.turns.compaction import Compaction
from chorale.turns.events import Fold, ItemDelta, ToolProgressed
from chorale.turns.functions import Function
from chorale.turns.needs import CallTool, Compact, Ended, Need, NextRound
from chorale.turns.request import NEVER, TurnRequest
from chorale.turns.rules import TurnRules
from tests.support.fuzz.random_turns import TEXTS, streams
from tests.support.scripted import FINAL, VOCAB, ids
from tests.support.scripted_tools import ScriptedBox, plain, result

EOS = frozenset({200002, 199999, CALL})
PROMPT = [1, 2, 3]
PYTHON = "<|channel|>analysis to=python code<|message|>print(42)<|call|>"
RESULT = [200006, 5, 6, 200007]  # stands for the message of a result


def request(**fields: Any) -> TurnRequest:
    given: dict[str, Any] = {"request_id": "r", "prompt_token_ids": PROMPT, "sampling": SamplingSpec()}
    return TurnRequest(**given | fields)


def harmony(**fields: Any) -> Choice:
    return Choice(VOCAB, request(**fields), 0, EOS)


def chunk(token_ids: list[int], finish: FinishReason | None = None, **fields: Any) -> TokenChunk:
    stop = token_ids[-1] if finish == "stop" else None
    return TokenChunk("r", 0, token_ids, finish, stop, **fields)


def with_tools(**asked: Any) -> Choice:
    """A choice whose model may call the python tool, or what ``asked`` says."""
    wanted = RequestTools(**asked or {"code_interpreter": CodeInterpreterRequest()})
    box = ScriptedBox(wanted, plain, {}, {})
    rules = TurnRules(built_in=built_in_tools(box))
    return harmony(rules=rules, tools=(TurnTools(box, "key"),), stream_interval=NEVER)


def folded(choice: Choice | RawChoice) -> Fold:
    fold = Fold()
    fold.add(choice.take())
    return fold


# --------------------------------------------------------------------------- Ended, NextRound


def test_nothing_is_needed_until_the_answer_has_ended() -> None:
    choice = harmony()
    assert choice.start() is None
    assert choice.feed(chunk(ids(FINAL + "Yes."))) is None
    assert choice.feed(chunk([RETURN], "stop")) == Ended()
    assert choice.feed(chunk(ids("more"), "length")) == Ended(), "chunks after the end are ignored"
    fold = folded(choice)
    assert fold.text("message") == "Yes."
    assert fold.ended.reason == "stop"


def test_an_answer_is_forced_once() -> None:
    choice = harmony()
    need = choice.feed(chunk([RETURN], "stop"))
    assert isinstance(need, NextRound)
    choice.begin_round(replace(need, prefill_token_ids=()))  # and again the model writes nothing
    assert choice.feed(chunk([RETURN], "stop")) == Ended()


def test_fail_and_end_return_values_and_happen_once() -> None:
    choice = harmony()
    choice.feed(chunk(ids(FINAL + "Yes")))
    assert choice.fail(EngineError("lost")) == Ended()
    assert choice.end("length") == Ended()
    fold = folded(choice)
    assert (fold.ended.reason, fold.items[0].status) == ("error", "incomplete")


# --------------------------------------------------------------------------- CallTool


def test_progress_of_a_tool_waits_for_no_tokens() -> None:
    choice = with_tools()
    need = choice.feed(chunk(ids(PYTHON), "stop"))
    assert isinstance(need, CallTool)
    choice.take()
    choice.tool_progressed(need, CodeOutput("42"))
    assert any(isinstance(event, ToolProgressed) for event in choice.take())


def test_approved_calls_come_first_one_after_the_other() -> None:
    choice = with_tools(mcp=(McpRequest("srv"),))
    approved = tuple(ApprovedCall(f"a{i}", "srv.echo", "echo", "srv", "{}", (7, i)) for i in range(2))
    choice = Choice(VOCAB, replace(choice._request, approved=approved), 0, EOS)
    first = choice.start()
    assert isinstance(first, CallTool)
    assert first.prompt_token_ids == [*PROMPT, 7, 0, CALL]
    second = choice.tool_done(first, result(first.call, "a"), RESULT)
    assert isinstance(second, CallTool)
    assert second.prompt_token_ids == [*PROMPT, 7, 0, CALL, *RESULT, *ids("<|start|>assistant"), 7, 1, CALL]
    after = choice.tool_done(second, result(second.call, "b"), RESULT)
    assert isinstance(after, NextRound)
    choice.begin_round(after)
    choice.end("stop")
    fold = folded(choice)
    assert fold.ended.usage.input_tokens == len(after.prompt_token_ids), "no model call came before it"


# --------------------------------------------------------------------------- Compact


def compaction(*, due: bool) -> Compaction:
    first = (8, 8) if due else None
    return Compaction(1, (9,), first, lambda text: f"<{text}>", lambda packed: [4])


def test_a_forced_answer_is_not_summarized_first() -> None:
    choice = harmony(compaction=compaction(due=False))
    assert isinstance(choice.feed(chunk([RETURN], "stop")), NextRound)


def test_without_room_for_a_summary_the_round_comes_as_it_is() -> None:
    choice = harmony(compaction=compaction(due=True))
    need = choice.start()
    assert isinstance(need, Compact)
    assert choice.skip_compaction(need) == NextRound(PROMPT, num_sampled=0)


# --------------------------------------------------------------------------- fed whole, fed token by token


def told(fold: Fold) -> Any:
    """Everything but drawn ids."""
    items = [
        (i.kind, i.opened.name, i.text, i.status, i.token_ids, i.content_token_ids, i.logprobs)
        for i in fold.items
    ]
    end = fold.ended
    return items, end.reason, end.stop_reason, end.usage, end.repairs, end.output_token_ids


def drive(choice: Choice | RawChoice, tokens: list[int], size: int, logprobs: bool) -> Any:
    """Feed ``tokens`` in pieces of ``size``, and answer what the choice needs with fixed words."""
    fold, need = Fold(), None
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        scored = [TokenLogprobs(token, -1.0, 1, [], []) for token in piece] if logprobs else None
        is_last = start + size >= len(tokens)
        need = choice.feed(chunk(piece, "length" if is_last else None, logprobs=scored))
        fold.add(choice.take())
        if need is not None:
            break
    need = meet(choice, need, fold)
    assert need == Ended()
    fold.add(choice.take())
    return told(fold)


def meet(choice: Choice | RawChoice, need: Need | None, fold: Fold) -> Need | None:
    while isinstance(choice, Choice) and need is not None and need != Ended():
        if isinstance(need, CallTool):
            need = choice.tool_done(need, need.refusal or ToolResult("t", "done", False, None), RESULT)  # type: ignore[arg-type]
        else:
            assert isinstance(need, NextRound)
            choice.begin_round(need)
            need = choice.feed(chunk([*ids("forced"), RETURN], "stop"))
            fold.add(choice.take())
    return need


quick = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(streams(), st.integers(1, 9), st.sampled_from([(), ("STOP",)]), st.booleans(), st.booleans())
def test_a_choice_does_not_depend_on_chunk_sizes(
    tokens: list[int], size: int, stop: tuple[str, ...], logprobs: bool, tools: bool
) -> None:
    def fed(size: int, interval: int) -> Any:
        functions = [Function(ToolDescription(name)) for name in ("f", "g")]
        options: dict[str, Any] = {"stop": stop, "stream_interval": interval}
        if tools:
            options["tools"] = with_tools()._request.tools
        return drive(harmony(rules=TurnRules(functions=functions), **options), tokens, size, logprobs)

    tokens = tokens or [RETURN]
    assert fed(len(tokens), NEVER) == fed(1, 1) == fed(size, 3)


PIECES = st.one_of(
    TEXTS.map(VOCAB.encode),
    st.lists(st.integers(0, 201087), max_size=4),
    st.lists(st.sampled_from([200006, 200008, 201000]), min_size=1, max_size=2),
)


@pytest.mark.parametrize("skip", [True, False])
def test_a_character_that_is_never_whole_is_replaced(skip: bool) -> None:
    """Whether a special token or the end cuts it."""
    half = VOCAB.encode("🧑‍🚀")[:2]
    tokens = [*VOCAB.encode("Some words"), *half, 200008, *VOCAB.encode(" more"), *half]
    choice = RawChoice(VOCAB, request(), 0, EOS, skip_special_tokens=skip)
    choice.feed(chunk(tokens, "length"))
    [item] = folded(choice).items
    assert item.text == f"Some words\ufffd{'' if skip else '<|message|>'} more\ufffd"
    assert item.content_token_ids == tokens


def test_a_partly_held_back_token_is_emitted_once() -> None:
    """Its space is shown at once; the rest may begin a stop string, and then does not."""
    tokens = [*VOCAB.encode("A hot"), *VOCAB.encode(" dog"), *VOCAB.encode(" days")]
    choice = RawChoice(VOCAB, request(stop=("dog food",), stream_interval=1), 0, EOS)
    for token in tokens:
        choice.feed(chunk([token]))
    choice.feed(chunk(VOCAB.encode(" end"), "length"))
    [item] = folded(choice).items
    assert item.text == "A hot dog days end"
    assert item.content_token_ids == [*tokens, *VOCAB.encode(" end")]


def test_tokens_of_one_character_are_emitted_with_its_text() -> None:
    first, *rest = VOCAB.encode("🧑")
    assert rest, "a character of several tokens"
    choice = RawChoice(VOCAB, request(), 0, EOS)
    choice.feed(chunk([*VOCAB.encode("word " * 20), first]))
    [delta] = [event for event in choice.take() if isinstance(event, ItemDelta)]
    assert list(delta.token_ids) == VOCAB.encode("word " * 20)


@quick
@given(
    st.lists(PIECES, min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from([(), ("STOP",), (" ",)]),
    st.booleans(),
    st.booleans(),
)
def test_a_raw_choice_does_not_depend_on_chunk_sizes(
    pieces: list[list[int]], size: int, stop: tuple[str, ...], logprobs: bool, skip: bool
) -> None:
    tokens = [token for piece in pieces for token in piece] * 2 or [5]

    def fed(size: int, interval: int) -> Any:
        given = request(stop=stop, stream_interval=interval)
        choice = RawChoice(VOCAB, given, 0, EOS, skip_special_tokens=skip)
        return drive(choice, tokens, size, logprobs)

    assert fed(len(tokens), NEVER) == fed(1, 1) == fed(size, 3)
