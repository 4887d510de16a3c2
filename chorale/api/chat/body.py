"""The non-streaming body of a chat completion, from the fold of each choice's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chorale.api.chat.answer import Answer, call_object
from chorale.api.chat.builtin import SHOWN, annotation, whole
from chorale.api.http.offload import beside
from chorale.api.logprobs import is_scored
from chorale.api.routed_experts import expert_field
from chorale.api.state import ServerState
from chorale.api.usage import closing_fields, version_field
from chorale.turns.events import CLIENT_CALLS, SEPARATOR, Fold, FoldedItem, TurnEnded
from chorale.turns.request import TurnRequest


async def ended_chat(
    state: ServerState, folds: Sequence[Fold], turn: TurnRequest, answer: Answer
) -> dict[str, Any]:
    """Returns the body of a chat whose choices have ended. Raises the ``ChoraleError`` of one that failed."""
    for fold in folds:
        if fold.ended is not None:
            state.metrics.repaired(fold.ended.repairs)
    scored = is_scored(turn.sampling)
    return await beside(lambda: chat_body(answer, folds, turn), heavy=scored)


def chat_body(answer: Answer, folds: Sequence[Fold], turn: TurnRequest) -> dict[str, Any]:
    """Returns the body. Raises the ``ChoraleError`` with which a choice ended."""
    ends = [fold.result() for fold in folds]
    choices = [
        _choice(answer, index, fold, ends[index]) | expert_field(turn, ends[index])
        for index, fold in enumerate(folds)
    ]
    body = answer.object("chat.completion", choices)
    body |= closing_fields([ends], metrics=answer.metrics)
    scored = ends[0].prompt_logprobs
    # Clients of vLLM read these keys, and its answers always have them.
    body["prompt_logprobs"] = None if scored is None else answer.logprobs.prompt(scored)
    body["prompt_token_ids"] = turn.prompt_token_ids if answer.request.return_token_ids else None
    return body


def _choice(answer: Answer, index: int, fold: Fold, ended: TurnEnded) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "message": _message(answer, fold),
        "logprobs": _logprobs(answer, fold),
        "finish_reason": answer.finish_reason(ended),
        "stop_reason": ended.stop_reason,
        "token_ids": list(ended.output_token_ids) if answer.shows_tokens else None,
    }
    return choice | version_field(ended) if answer.request.return_weight_versions else choice


def _message(answer: Answer, fold: Fold) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": fold.joined("message"),
        "refusal": None,
        "annotations": _annotations(fold.items),
    }
    if answer.reasoning_fields:
        reasoning = fold.joined("reasoning")
        message |= dict.fromkeys(answer.reasoning_fields, reasoning)
    calls = [call_object(item.opened, item.text) for item in fold.items if item.kind in CLIENT_CALLS]
    if calls and answer.legacy_call:
        message["function_call"] = calls[0]["function"]
    elif calls:
        message["tool_calls"] = calls
    if builtin := [whole(item) for item in fold.items if item.kind in SHOWN]:
        message["builtin_tool_calls"] = builtin
    return message


def _annotations(items: Sequence[FoldedItem]) -> list[dict[str, Any]]:
    """Returns citations with offsets from the beginning of the message's content."""
    found: list[dict[str, Any]] = []
    offset = 0
    for item in items:
        if item.kind == "message" and item.text:
            found += [annotation(citation, offset) for citation in item.citations]
            offset += len(item.text) + len(SEPARATOR)
    return found


def _logprobs(answer: Answer, fold: Fold) -> dict[str, Any] | None:
    """Returns the log-probabilities of the tokens of ``content``, or one for each of ``token_ids``."""
    num_top = answer.request.num_logprobs
    if num_top is None:
        return None
    content = [entry for item in fold.items if item.kind == "message" for entry in item.logprobs]
    entries = fold.scores if answer.shows_tokens else content
    return answer.logprobs.chat(entries, num_top)
