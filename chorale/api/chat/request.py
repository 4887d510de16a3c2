"""ChatRequest: the body of POST /v1/chat/completions, and how each field is handled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from chorale.api import fields, limits
from chorale.api.fields import Metadata, Refusal, StreamedFields
from chorale.errors import invalid, unsupported
from chorale.requests.formats import check_keys
from chorale.requests.readers import optional_string

_STORED = ("metadata", "store")  # harmless if nothing is stored
HARMLESS: dict[str, str] = {name: why for name, why in fields.HARMLESS.items() if name not in _STORED} | {
    "skip_special_tokens": "harmony is always parsed; special tokens are never part of a message's text",
    "add_special_tokens": "harmony determines the special tokens of a prompt",
    "chat_template_content_format": "there is one template, harmony",
    "verbosity": "a hint that the model was not trained to follow",
    "prediction": "a hint for speed that does not change the output",
}

REFUSED: dict[str, Refusal] = fields.REFUSED | {
    "audio": Refusal("the model writes text only"),
    "chat_template": Refusal("there is one template, harmony; templates in requests are never run"),
    "documents": Refusal("include documents in a message"),
    "echo": Refusal("responses never repeat the prompt"),
    "moderation": Refusal("there is no moderation model"),
    "return_prompt_text": Refusal("use /tokenize for a chat's tokens and /detokenize for their text"),
    "best_of": Refusal("removed from the API; use n", neutral=(1,)),
}


class ChatRequest(StreamedFields):
    """The validated fields. Messages and tools are checked during conversion, with exact paths in errors."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1), limits.items("messages")]
    max_tokens: Annotated[int, limits.number("max_tokens")] | None = None
    max_completion_tokens: Annotated[int, limits.number("max_completion_tokens")] | None = None
    store: bool = False
    metadata: Annotated[Metadata, limits.items("metadata")] | None = None

    tools: Annotated[list[dict[str, Any]], limits.items("tools")] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    web_search_options: dict[str, Any] | None = None
    functions: Annotated[list[dict[str, Any]], limits.items("tools")] | None = (
        None  # the predecessor of ``tools``
    )
    function_call: str | dict[str, Any] | None = None

    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    response_format: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, limits.number("thinking_token_budget")] | None = None
    modalities: list[str] | None = None

    logprobs: bool = False
    top_logprobs: Annotated[int, limits.number("top_logprobs")] | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def effort(self) -> tuple[Any, str]:
        """Returns the requested effort, or None, and the name of its field."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort, "reasoning_effort"
        if self.reasoning is not None and self.reasoning.get("effort") is not None:
            return self.reasoning["effort"], "reasoning.effort"
        return (self.chat_template_kwargs or {}).get(
            "reasoning_effort"
        ), "chat_template_kwargs.reasoning_effort"

    @property
    def identity(self) -> str | None:
        identity: str | None = (self.chat_template_kwargs or {}).get("model_identity")
        return identity


def parse_chat(data: Mapping[str, Any]) -> ChatRequest:
    """Validates a body. Raises ``RequestError`` for the first invalid, unknown or unsupported field."""
    chat = fields.parse(ChatRequest, data, HARMLESS, REFUSED)
    _check_logprobs(chat)
    if chat.modalities is not None and chat.modalities != ["text"]:
        raise unsupported("modalities", "the model writes text only")
    _check_template(chat)
    return chat


def _check_logprobs(chat: ChatRequest) -> None:
    if chat.top_logprobs and not chat.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    if chat.logprob_token_ids and not chat.logprobs:
        raise invalid("logprob_token_ids", "needs logprobs to be true")
    chat.check_stream()


def _check_template(chat: ChatRequest) -> None:
    kwargs = chat.chat_template_kwargs or {}
    check_keys(kwargs, ("reasoning_effort", "model_identity", "builtin_tools"), "chat_template_kwargs")
    names = kwargs.get("builtin_tools") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise invalid("chat_template_kwargs.builtin_tools", "must be a list of names")
    optional_string(kwargs, "model_identity", "chat_template_kwargs")
    check_keys(chat.reasoning or {}, ("effort", "summary", "generate_summary"), "reasoning")
    if chat.add_generation_prompt is not None and chat.add_generation_prompt == chat.continue_final_message:
        raise invalid("add_generation_prompt", "may be false only together with continue_final_message")
