"""The request model of POST /v1/responses, and how each field is handled.

A top-level field is used (a field of ``ResponsesRequest``), accepted without effect (``HARMLESS``, with the
reason) or refused (``REFUSED``). ``--unknown-fields`` decides whether other fields are ignored or refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from chorale.api import fields, limits
from chorale.api.fields import Include, Metadata, Refusal, StreamOptions, StrictModel, StructuredFields, parse
from chorale.errors import RequestError
from chorale.requests.effort import reasoning_effort

LOGPROBS: Include = "message.output_text.logprobs"

_STORED = frozenset({"metadata", "store", "user", "safety_identifier", "service_tier", "prompt_cache_key"})
HARMLESS: dict[str, str] = {
    **{name: why for name, why in fields.HARMLESS.items() if name not in _STORED},
    "skip_special_tokens": "special tokens are not part of the text",
    "access_programs": "a setting of OpenAI accounts",
    "image": "a setting for images; image parts are refused",
    "client_metadata": "labels that Codex sends for OpenAI's own logs",
}
REFUSED: dict[str, Refusal] = {
    **fields.REFUSED,
    "enable_response_messages": Refusal("responses contain items, not harmony messages"),
    "previous_input_messages": Refusal("send `input` items or `previous_response_id`", neutral=([],)),
    "previous_response": Refusal("send `previous_response_id`", neutral=()),
    "prompt": Refusal(
        "prompt templates exist only on OpenAI's servers; send instructions and input", neutral=()
    ),
    "personality": Refusal("use `instructions`", neutral=()),
    "moderation": Refusal("there is no moderation model", neutral=()),
}


class ReasoningOptions(StrictModel):
    """Reasoning options. With any ``summary``, the reasoning itself is returned as the summary."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None

    @property
    def summary_asked(self) -> str | None:
        """Returns ``summary``, or ``generate_summary``, its older name."""
        return self.summary or self.generate_summary


class TextOptions(StrictModel):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # echoed; gpt-oss has no such setting


class BackgroundOptions(StrictModel):
    """Options of OpenAI's discounted completion windows. Here every response runs as soon as possible."""

    completion_window: Literal["soonest"] | None = None
    continuation_id: Annotated[str, limits.items("identifier")] | None = None  # has no effect


class ContextManagement(StrictModel):
    """When to summarize the conversation: if the prompt has more than ``compact_threshold`` tokens."""

    type: Literal["compaction"]
    compact_threshold: Annotated[int, limits.number("compact_threshold")] | None = None


class ConversationReference(StrictModel):
    id: Annotated[str, limits.items("identifier")]


class TemplateOptions(StrictModel):
    """The supported names in ``chat_template_kwargs``; others are refused."""

    reasoning_effort: str | None = None
    model_identity: Annotated[str, Field(max_length=4096)] | None = None
    builtin_tools: Annotated[list[str], Field(max_length=8)] | None = None  # "browser", "python"


Identifier = Annotated[str, limits.items("identifier")]


def as_message(text: Any) -> Any:
    """Converts a string to a list of one user message."""
    return [{"type": "message", "role": "user", "content": text}] if isinstance(text, str) else text


def _reference(value: Any) -> Any:
    """Converts an id to an object with that id."""
    return {"id": value} if isinstance(value, str) else value


class ResponsesRequest(StructuredFields):
    """The request body. Each field is validated alone; ``parse_request`` checks combinations of fields."""

    model: str | None = None
    input: (
        Annotated[
            list[dict[str, Any]],
            limits.items("input"),
            BeforeValidator(as_message, json_schema_input_type=str | list[dict[str, Any]]),
        ]
        | None
    ) = None
    instructions: str | None = None
    previous_response_id: Identifier | None = None
    conversation: (
        Annotated[
            ConversationReference,
            BeforeValidator(_reference, json_schema_input_type=str | ConversationReference),
        ]
        | None
    ) = None
    store: bool = True
    background: bool = False
    background_options: BackgroundOptions | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    include: list[Include] = Field(default_factory=list)
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    tools: Annotated[list[dict[str, Any]], limits.items("tools")] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Annotated[int, limits.number("max_output_tokens")] | None = None
    max_tool_calls: Annotated[int, limits.number("max_tool_calls")] | None = None
    top_logprobs: Annotated[int, limits.number("top_logprobs")] = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    context_management: Annotated[list[ContextManagement], Field(max_length=1)] = Field(default_factory=list)
    metadata: Annotated[Metadata, limits.items("metadata")] = Field(default_factory=dict)
    user: Identifier | None = None
    safety_identifier: Identifier | None = None
    prompt_cache_key: Identifier | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    n: Annotated[int, limits.number("n")] | None = None  # langchain-openai sends 1
    include_reasoning: bool = True
    thinking_token_budget: Annotated[int, limits.number("thinking_token_budget")] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    continue_final_message: bool = False  # the last item, which a stopped response left open

    @property
    def effort(self) -> str | None:
        """Returns the requested effort, given in OpenAI's or vLLM's field."""
        return self.reasoning.effort or self.reasoning_effort or self.chat_template_kwargs.reasoning_effort

    @property
    def obfuscates(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_obfuscation)

    def compact_threshold(self, max_model_len: int) -> int | None:
        """Returns the number of prompt tokens above which to summarize the conversation; None: never."""
        if not self.context_management:
            return None
        return self.context_management[0].compact_threshold or max_model_len * 3 // 4

    @property
    def num_logprobs(self) -> int | None:
        """Returns the number of alternatives per token, or None if log-probabilities are not requested."""
        return self.top_logprobs if LOGPROBS in self.include else None


def parse_request(data: dict[str, Any], *, needs_input: bool = True) -> ResponsesRequest:
    """Validates a body. Raises ``RequestError`` that names the invalid field."""
    request = parse(ResponsesRequest, data, HARMLESS, REFUSED)
    continues = request.previous_response_id is not None or request.conversation is not None
    if needs_input and not request.input and not continues:
        hint = "; `messages` belongs to /v1/chat/completions" if "messages" in data else ""
        raise RequestError(f"'input' is required{hint}", param="input", code="missing_required_parameter")
    _check(request)
    return request


def _check(request: ResponsesRequest) -> None:
    if request.previous_response_id is not None and request.conversation is not None:
        raise RequestError(
            "'previous_response_id' and 'conversation' cannot be used together",
            param="previous_response_id",
            code="mutually_exclusive_parameters",
        )
    if request.background and not request.store:
        raise RequestError("'background' requires 'store'", param="background")
    if request.background and request.include_record:
        raise unsupported("'include_record': not available with 'background'", "include_record")
    if request.background_options is not None and not request.background:
        raise RequestError("'background_options' requires 'background'", param="background_options")
    if request.continue_final_message and request.context_management:
        raise unsupported(
            "'continue_final_message': cannot be used together with context_management",
            "continue_final_message",
        )
    if request.n not in (None, 1):
        raise unsupported("'n': must be 1", "n")
    if request.reasoning.mode not in (None, "standard"):
        raise unsupported("reasoning.mode: only 'standard' is supported", "reasoning.mode")
    reasoning_effort(request.effort, "reasoning.effort")


def unsupported(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_value")


_SECRETS = ("authorization", "headers")  # fields of MCP tools that are not stored


def packed_request(data: Mapping[str, Any]) -> bytes | None:
    """Returns the compressed body, for another server to resume, or None if it contains secrets."""
    tools = data.get("tools") or ()
    if any(isinstance(tool, Mapping) and any(tool.get(name) for name in _SECRETS) for tool in tools):
        return None
    return zlib.compress(json.dumps(data, separators=(",", ":")).encode("utf-8", "surrogatepass"), 1)
