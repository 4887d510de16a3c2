"""MessagesRequest: the body of POST /v1/messages, and how each field is handled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from chorale.api import fields, limits
from chorale.api.fields import Refusal, SamplingFields, StopString, StrictModel
from chorale.api.http.anthropic_errors import THREAD_UNSUPPORTED
from chorale.api.http.body import parse_model
from chorale.errors import RequestError, invalid

HARMLESS: dict[str, str] = {
    "metadata": "an end-user label; nothing here depends on it",
    "service_tier": "there is only one tier; responses say `standard`",
    "cache_control": "the prefix cache finds equal prefixes by itself",
    "context_management": "the server never edits a conversation; send one that fits",
    "diagnostics": "the response's usage contains cached tokens",
    "user_profile_id": "a label of Anthropic accounts",
    "workspace_id": "a label of Anthropic accounts",
    "betas": "features are selected by their fields",
    "billing_policy": "there is no billing",
    "fallback_credit_token": "there is no billing",
}

REFUSED: dict[str, Refusal] = {
    "compaction": Refusal("conversations are summarized by /v1/responses/compact"),
    "container": Refusal("there are no containers"),
    "mcp_servers": Refusal("MCP servers are reached through /v1/responses and Chat Completions"),
    "inference_geo": Refusal("the server has one location", neutral=("", "global", "not_available")),
    "speed": Refusal("there is only one speed", neutral=("", "standard")),
    "fallbacks": Refusal("there is one model"),
    "thread": Refusal("conversations are not stored; send all messages", code=THREAD_UNSUPPORTED),
    "stop": Refusal("use stop_sequences", neutral=()),
} | {
    name: fields.REFUSED[name]
    for name in ("logits_processors", "use_beam_search", "vllm_xargs", "truncate_prompt_tokens")
}


class Thinking(StrictModel):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, limits.number("thinking_token_budget")] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(StrictModel):
    effort: str | None = None
    format: dict[str, Any] | None = None


class AnthropicToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


def _listed(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class CountRequest(SamplingFields):
    """The body of count_tokens: all fields that affect the prompt."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1), limits.items("messages")]
    model: str | None = None
    system: (
        Annotated[
            list[dict[str, Any]],
            limits.items("messages"),
            BeforeValidator(_listed, json_schema_input_type=str | list[dict[str, Any]]),
        ]
        | None
    ) = None
    tools: Annotated[list[dict[str, Any]], limits.items("tools")] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def shows_thinking(self) -> bool:
        """Returns whether the request asks for thinking blocks in the response."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def omits_thinking(self) -> bool:
        """Returns whether thinking blocks are sent without text, which the signature replaces."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def budget(self) -> int | None:
        return None if self.thinking is None else self.thinking.budget_tokens


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, limits.number("max_tokens")]
    stop_sequences: Annotated[list[StopString], limits.items("stop")] | None = None
    stream: bool = False
    include_record: bool = False


def parse_messages(data: Mapping[str, Any]) -> MessagesRequest:
    """Validates a body. Raises ``RequestError`` for the first invalid, unknown or unsupported field."""
    request = parse_model(MessagesRequest, _triage(data))
    _check(request)
    return request


def parse_count(data: Mapping[str, Any]) -> CountRequest:
    """Validates a body of count_tokens. Ignores fields that only POST /v1/messages uses."""
    known = CountRequest.model_fields
    kept = {name: value for name, value in _triage(data).items() if name in known}
    request = parse_model(CountRequest, kept)
    _check(request)
    return request


def _triage(data: Mapping[str, Any]) -> dict[str, Any]:
    honoured = [name for name in MessagesRequest.model_fields if name not in REFUSED]
    return fields.triage(data, honoured, HARMLESS, REFUSED)


def _check(request: CountRequest) -> None:
    thinking = request.thinking
    if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is None:
        raise RequestError(
            "thinking.budget_tokens: is required with type 'enabled'",
            param="thinking.budget_tokens",
            code="missing_required_parameter",
        )
    choice = request.tool_choice
    if choice is not None and (choice.name is None) == (choice.type == "tool"):
        raise invalid("tool_choice.name", "is required with type 'tool' and not allowed with other types")
