"""GenerateRequest: the body of POST /inference/v1/generate, in vLLM's form, and how each field is handled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from chorale.api import fields, limits
from chorale.api.chat.request import ChatRequest, parse_chat
from chorale.api.field_docs import described
from chorale.api.fields import LogprobTokenIds, Refusal, SamplerFields, StreamOptions, StrictModel, TokenId
from chorale.api.http.body import parse_model
from chorale.errors import invalid
from chorale.harmony.render import ASSISTANT
from chorale.harmony.vocab import START
from chorale.requests.readers import within

_TEXT_ONLY = Refusal("the model takes text only")
HARMLESS: dict[str, str] = {
    "token_offsets": "places in a text that the server does not have",
    "reasoning_parser_kwargs": "harmony is parsed without options",
}
REFUSED: dict[str, Refusal] = {"features": _TEXT_ONLY, "content_parts": _TEXT_ONLY} | {
    name: fields.REFUSED[name] for name in ("kv_transfer_params", "ec_transfer_params")
}
SAMPLING_HARMLESS: dict[str, str] = {
    "spaces_between_special_tokens": fields.HARMLESS["spaces_between_special_tokens"],
    "output_kind": "`stream` decides it",
    "flat_logprobs": "a form within vLLM's process",
    "skip_clone": "a form within vLLM's process",
    "output_text_buffer_length": "follows from `stop`",
}
_SAMPLER = (
    "use_beam_search", "logits_processors", "truncate_prompt_tokens", "watermarking",
    "repetition_detection", "stream_interval",
)  # fmt: skip
SAMPLING_REFUSED: dict[str, Refusal] = {name: fields.REFUSED[name] for name in _SAMPLER} | {
    "extra_args": Refusal("there are no engine extensions"),
    "prompt_logprob_token_ids": Refusal("prompts are scored for the likeliest tokens only"),
    "prompt_logprob_start": Refusal("the whole prompt is scored"),
    "skip_reading_prefix_cache": Refusal("use a cache_salt that no other request has"),
    "trace_decode_token_ids": Refusal("tokens are always sampled"),
}
_CONTEXT = ("tools", "tool_choice", "parallel_tool_calls", "include_reasoning")
_CONTEXT_HARMLESS = {
    "chat_template_kwargs": "harmony is parsed without options",
    "history_tool_call_cnt": "ids of calls are drawn, not counted",
}


class TokenSampling(SamplerFields):
    """``sampling_params``: vLLM's ``SamplingParams``. ``max_tokens`` None: the rest of the window."""

    n: Annotated[int, limits.number("n")] = 1
    max_tokens: Annotated[int, limits.number("max_tokens")] | None = None
    logprobs: Annotated[int, limits.number("logprobs")] | None = None
    logprob_token_ids: LogprobTokenIds | None = None
    prompt_logprobs: Annotated[int, limits.number("prompt_logprobs")] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, limits.number("thinking_token_budget")] | None = None
    routed_experts_prompt_start: Annotated[int, limits.number("routed_experts_prompt_start")] = 0

    priority: ClassVar[None] = None  # a field of the request, not of its sampling

    @property
    def num_logprobs(self) -> int | None:
        return 0 if self.logprob_token_ids and self.logprobs is None else self.logprobs


class GenerateRequest(StrictModel):
    model_config = ConfigDict(json_schema_extra=described)

    token_ids: Annotated[list[TokenId], Field(min_length=1), limits.items("prompt_tokens")]
    sampling_params: TokenSampling
    request_id: Annotated[str, Field(min_length=1), limits.items("identifier")] | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text", "derender"] = "tokens"
    parse_context: dict[str, Any] | None = None
    reasoning_ended: bool = False
    return_token_ids: bool = False
    priority: Annotated[int, limits.number("priority")] | None = None
    cache_salt: Annotated[str, Field(min_length=1), limits.items("identifier")] | None = None

    @property
    def is_chat(self) -> bool:
        """Returns whether the model begins a turn: constraints then apply to its answer, after its
        reasoning."""
        return self.token_ids[-2:] == [START, ASSISTANT] and not self.reasoning_ended

    def chat(self) -> ChatRequest:
        """Returns a chat with the constraints of this request. Raises ``RequestError``."""
        sampling = self.sampling_params
        with within(placed):
            return parse_chat(
                {
                    "messages": [{"role": "user", "content": ""}],
                    "structured_outputs": sampling.structured_outputs,
                    "thinking_token_budget": sampling.thinking_token_budget,
                    "n": sampling.n,
                    "logprobs": sampling.num_logprobs is not None,
                    "top_logprobs": sampling.logprobs,
                    **(self.parse_context or {}),
                }
            )


class AbortRequest(StrictModel):
    model_config = ConfigDict(json_schema_extra=described)

    request_ids: Annotated[
        list[Annotated[str, limits.items("identifier")]], Field(min_length=1), limits.items("request_ids")
    ]


def placed(param: str) -> str:
    """Completes the path of a field of ``sampling_params`` or ``parse_context``; see ``within``."""
    root = re.split(r"[.\[]", param)[0]
    if root in TokenSampling.model_fields:
        return f"sampling_params.{param}"
    return f"parse_context.{param}" if root in _CONTEXT else param


def parse_generate(data: Mapping[str, Any]) -> GenerateRequest:
    """Validates a body. Raises ``RequestError`` for the first invalid, unknown or unsupported field."""
    kept = fields.triage(data, GenerateRequest.model_fields, HARMLESS, REFUSED)
    for name, known, harmless, refused in (
        ("sampling_params", TokenSampling.model_fields, SAMPLING_HARMLESS, SAMPLING_REFUSED),
        ("parse_context", _CONTEXT, _CONTEXT_HARMLESS, {}),
    ):
        if isinstance(kept.get(name), dict):
            kept[name] = fields.triage(kept[name], known, harmless, refused, f"{name}.")
    asked = parse_model(GenerateRequest, kept)
    sampling = asked.sampling_params
    if asked.stream and sampling.prompt_logprobs is not None:
        raise invalid("sampling_params.prompt_logprobs", "not available when streaming")
    if asked.stream and sampling.routed_experts_prompt_start:
        raise invalid("sampling_params.routed_experts_prompt_start", "not available when streaming")
    if asked.stream and asked.output_mode == "derender":
        raise invalid("output_mode", "derender is not available when streaming")
    if asked.stream_options is not None and not asked.stream:
        raise invalid("stream_options", "requires stream to be true")
    if not sampling.detokenize and (sampling.stop or asked.output_mode != "tokens"):
        raise invalid("sampling_params.detokenize", "must be true for stop strings, text and derender")
    return asked
