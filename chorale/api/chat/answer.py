"""What chunks and body of a chat completion share: field names, finish reasons, call objects."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from chorale.api.chat.request import ChatRequest
from chorale.api.logprobs import LogprobsWriter
from chorale.api.state import ServerState
from chorale.api.usage import ShownMetrics
from chorale.ids import new_completion_id
from chorale.turns.events import EndReason, ItemOpened, TurnEnded

CHUNK = "chat.completion.chunk"
FINISH: dict[EndReason, str] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The values that are constant over all chunks of a chat completion."""

    chat: ChatRequest
    model: str
    reasoning_fields: tuple[str, ...]  # names of the reasoning fields; empty hides it
    logprobs: LogprobsWriter
    metrics: ShownMetrics
    fingerprint: str | None
    id: str = field(default_factory=lambda: new_completion_id("chatcmpl"))
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, state: ServerState, chat: ChatRequest) -> Answer:
        names = state.config.reasoning_field
        shown = ("reasoning", "reasoning_content") if names == "both" else (names,)
        return cls(
            chat=chat,
            model=state.model_names[0],
            reasoning_fields=shown if chat.include_reasoning else (),
            logprobs=LogprobsWriter(
                state.vocab, chat.return_tokens_as_token_ids, bool(chat.logprob_token_ids)
            ),
            metrics=state.shown_metrics(),
            fingerprint=state.fingerprint,
        )

    @property
    def shows_tokens(self) -> bool:
        """Returns whether to send ids and log-probabilities of all tokens, none of which may be hidden."""
        return self.chat.return_token_ids and self.chat.include_reasoning

    @property
    def legacy_call(self) -> bool:
        """Returns whether the request has ``functions``, so that a call is ``function_call``."""
        return bool(self.chat.functions) and not self.chat.tools

    def completion(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the top-level fields of a chunk or of the body."""
        fields = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": "default",
        }
        return fields if self.fingerprint is None else {**fields, "system_fingerprint": self.fingerprint}

    def finish_reason(self, ended: TurnEnded) -> str:
        reason = FINISH[ended.reason]
        return "function_call" if reason == "tool_calls" and self.legacy_call else reason


def call_object(opened: ItemOpened, arguments: str) -> dict[str, Any]:
    """Returns a tool call object. ``arguments``: the input, for a call of a custom tool."""
    if opened.kind == "custom_tool_call":
        custom = {"name": opened.name, "input": arguments}
        return {"id": opened.call_id, "type": "custom", "custom": custom}
    return {
        "id": opened.call_id,
        "type": "function",
        "function": {"name": opened.name, "arguments": arguments},
    }
