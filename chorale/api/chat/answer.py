"""What chunks and body of a chat completion share: field names, finish reasons, call objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from chorale.api.answer import ChunkedAnswer
from chorale.api.chat.request import ChatRequest
from chorale.api.state import ServerState
from chorale.turns.events import ItemOpened, TurnEnded


@dataclass(frozen=True, kw_only=True)
class Answer(ChunkedAnswer):
    prefix: ClassVar[str] = "chatcmpl"
    constant: ClassVar[dict[str, Any]] = {"service_tier": "default"}

    request: ChatRequest
    reasoning_fields: tuple[str, ...]  # names of the reasoning fields; empty hides it

    @classmethod
    def of(cls, state: ServerState, request: Any, **more: Any) -> Self:
        names = state.config.reasoning_field
        shown = ("reasoning", "reasoning_content") if names == "both" else (names,)
        return super().of(state, request, reasoning_fields=shown if request.include_reasoning else (), **more)

    @property
    def shows_tokens(self) -> bool:
        """Returns whether to send ids and log-probabilities of all tokens, none of which may be hidden."""
        return self.request.return_token_ids and self.request.include_reasoning

    @property
    def legacy_call(self) -> bool:
        """Returns whether the request has ``functions``, so that a call is ``function_call``."""
        return bool(self.request.functions) and not self.request.tools

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self.object("chat.completion.chunk", choices)

    def finish_reason(self, ended: TurnEnded) -> str:
        is_legacy = ended.reason == "tool_calls" and self.legacy_call
        return "function_call" if is_legacy else ended.reason


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
