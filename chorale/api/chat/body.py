"""ChatAnswer: the stream of a chat completion, and its body from the fold of each choice's events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from chorale.api.answer import Folds, Writer
from chorale.api.chat.builtin import SHOWN, annotation, whole
from chorale.api.chat.chunks import ChatFields, ChunkWriter, call_object
from chorale.api.chat.stored import keep
from chorale.api.routed_experts import expert_field
from chorale.api.state import ServerState
from chorale.api.usage import closing_fields, version_field
from chorale.turns.events import CLIENT_CALLS, SEPARATOR, Fold, FoldedItem
from chorale.turns.request import TurnRequest


@dataclass(frozen=True, kw_only=True)
class ChatAnswer(ChatFields):
    """``owner``: the digest of the caller's key."""

    is_direct: ClassVar[bool] = True

    owner: bytes = b""

    @property
    def is_stored(self) -> bool:
        return self.request.store

    async def keep(self, state: ServerState, body: Mapping[str, Any]) -> None:
        await keep(state, self.request, body, self.owner)

    def writer(self, position: int, index: int) -> ChunkWriter:
        return ChunkWriter(self, self.turns[position], index)

    def opening(self, writers: Sequence[Writer]) -> bytes:
        """Starts all choices in order: OpenAI's SDK lists them in the order of their first chunks."""
        return b"".join([writer.feed(()) for writer in writers])

    def body(self, folds: Folds) -> dict[str, Any]:
        ends = [fold.result() for fold in folds[0]]
        turn = self.turns[0]
        choices = [choice(self, turn, index, fold) for index, fold in enumerate(folds[0])]
        body = self.object("chat.completion", choices) | closing_fields([ends], metrics=self.metrics)
        scored = ends[0].prompt_logprobs
        # Clients of vLLM read these keys, and its answers always have them.
        body["prompt_logprobs"] = None if scored is None else self.logprobs.prompt(scored)
        body["prompt_token_ids"] = turn.prompt_token_ids if self.request.return_token_ids else None
        return body


def choice(answer: ChatFields, turn: TurnRequest, index: int, fold: Fold) -> dict[str, Any]:
    """Returns a choice of the body. Raises the ``ChoraleError`` with which it ended."""
    ended = fold.result()
    choice: dict[str, Any] = {
        "index": index,
        "message": _message(answer, fold),
        "logprobs": _logprobs(answer, fold),
        "finish_reason": answer.finish_reason(ended),
        "stop_reason": ended.stop_reason,
        "token_ids": list(ended.output_token_ids) if answer.shows_tokens else None,
    }
    if answer.request.return_weight_versions:
        choice |= version_field(ended)
    return choice | expert_field(turn, ended)


def _message(answer: ChatFields, fold: Fold) -> dict[str, Any]:
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


def _logprobs(answer: ChatFields, fold: Fold) -> dict[str, Any] | None:
    """Returns the log-probabilities of the tokens of ``content``, or one for each of ``token_ids``."""
    num_top = answer.request.num_logprobs
    if num_top is None:
        return None
    content = [entry for item in fold.items if item.kind == "message" for entry in item.logprobs]
    entries = fold.scores if answer.shows_tokens else content
    return answer.logprobs.chat(entries, num_top)
