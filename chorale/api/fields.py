"""Request fields common to the generating endpoints, and how each field is handled: none is silently ignored.

A top-level key is honoured (a field of the request model), harmless (accepted without effect; a table gives
the reason), refused by name, or unknown (``tracing/ignored.py``: named in the response, or an error).
``docs/reference/api-fields.md`` and the boundary tests use the same tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from chorale.api import limits
from chorale.api.field_docs import described
from chorale.api.http.body import Model, parse_model
from chorale.config.engine import ServerConfig
from chorale.errors import RequestError, invalid
from chorale.tracing.ignored import unknown_field

Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "metrics",  # not OpenAI's: adds the engine's times, as --enable-per-request-metrics does
]


TokenId = Annotated[int, limits.number("token_id")]
LogprobTokenIds = Annotated[list[TokenId], limits.items("logprob_token_ids")]
Metadata = dict[Annotated[str, limits.items("metadata_key")], Annotated[str, limits.items("metadata_value")]]
StopString = Annotated[str, Field(min_length=1), limits.utf8_bytes("stop_bytes")]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A known field that is not supported. ``neutral``: values that request nothing and are accepted.

    ``code``: the error's code, if clients expect a specific one.
    """

    reason: str
    neutral: tuple[Any, ...] = (False, [], {}, "")
    code: str = "unsupported_parameter"


HARMLESS: dict[str, str] = {
    "user": "an end-user label; nothing here depends on it",
    "safety_identifier": "an end-user label; nothing here depends on it",
    "metadata": "labels for stored objects; this endpoint stores none",
    "store": "this endpoint stores nothing",
    "service_tier": "there is only one tier; responses say `default`",
    "prompt_cache_key": "the prefix cache finds equal prefixes by itself",
    "prompt_cache_options": "the prefix cache finds equal prefixes by itself",
    "prompt_cache_retention": "the prefix cache finds equal prefixes by itself",
    "request_id": "ids of answers are assigned by the server; label a request with the X-Request-Id header",
    "session_id": "a label for routers; the prefix cache finds equal prefixes by itself",
    "truncation_side": "prompts are never truncated",
    "spaces_between_special_tokens": "special tokens are not part of the text",
    "detokenize": "text is always returned",
    "guided_decoding_backend": "there is one back end, which supports every kind of constraint",
}

REFUSED: dict[str, Refusal] = {
    "logits_processors": Refusal("code from a request is never run"),
    "use_beam_search": Refusal("beam search is not offered"),
    "length_penalty": Refusal("beam search is not offered", neutral=(1, 1.0)),
    "early_stopping": Refusal("beam search is not offered"),
    "kv_transfer_params": Refusal("there is no disaggregated prefill"),
    "ec_transfer_params": Refusal("there is no disaggregated prefill"),
    "vllm_xargs": Refusal("there are no engine extensions"),
    "truncate_prompt_tokens": Refusal("prompts are never truncated; send one that fits", neutral=()),
    "repetition_detection": Refusal("repetition is not detected; see repetition_penalty"),
    "stream_interval": Refusal("set for the whole server by --stream-interval"),
    "watermarking": Refusal("answers are not watermarked"),
    "guided_whitespace_pattern": Refusal(
        "JSON is written with at most one space or line break between tokens"
    ),
    "structural_tag": Refusal("the structure of a turn is given by harmony"),
    "mm_processor_kwargs": Refusal("the model takes text only"),
    "media_io_kwargs": Refusal("the model takes text only"),
    "prompt_embeds": Refusal("prompts are text or token ids"),
}


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StrictModel(BaseModel):
    """The base of request models: types are not converted, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(StrictModel):
    """Options of a stream. ``include_obfuscation`` has no effect: obfuscation is never added."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def wants_usage(options: StreamOptions | None) -> bool:
    """Returns whether a stream ends with a chunk of the total usage."""
    return options is not None and bool(options.include_usage)


def wants_continuous_usage(options: StreamOptions | None) -> bool:
    """Returns whether every chunk contains the usage so far."""
    return options is not None and bool(options.include_usage and options.continuous_usage_stats)


class SamplerFields(StrictModel):
    """Sampling fields under OpenAI's names, then vLLM's. None selects the default."""

    model_config = ConfigDict(json_schema_extra=described)

    temperature: Annotated[float, limits.number("temperature")] | None = None
    top_p: Annotated[float, limits.number("top_p")] | None = None
    presence_penalty: Annotated[float, limits.number("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, limits.number("frequency_penalty")] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, limits.number("logit_bias")]], limits.items("logit_bias")] | None
    ) = None
    seed: Annotated[int, limits.number("seed")] | None = None
    stop: (
        Annotated[
            list[StopString],
            limits.items("stop"),
            BeforeValidator(_listed, json_schema_input_type=StopString | list[StopString]),
        ]
        | None
    ) = None

    top_k: Annotated[int, limits.number("top_k")] | None = None
    min_p: Annotated[float, limits.number("min_p")] | None = None
    repetition_penalty: Annotated[float, limits.number("repetition_penalty")] | None = None
    min_tokens: Annotated[int, limits.number("min_tokens")] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], limits.items("stop_token_ids")] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1), limits.items("allowed_token_ids")] | None
    ) = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], limits.items("bad_words")] | None
    ) = None


class SamplingFields(SamplerFields):
    """The same, with the request's place in the queue and in the prefix cache."""

    priority: Annotated[int, limits.number("priority")] | None = None
    cache_salt: Annotated[str, Field(min_length=1), limits.items("identifier")] | None = None


class StructuredFields(SamplingFields):
    """Fields that constrain the output, under vLLM's new and old names (see ``structured.py``)."""

    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    include_record: bool = False


class StreamedFields(StructuredFields):
    """Fields common to Chat Completions and Completions."""

    model: str | None = None
    n: Annotated[int, limits.number("n")] = 1
    prompt_logprobs: Annotated[int, limits.number("prompt_logprobs")] | None = None
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool = False
    logprob_token_ids: LogprobTokenIds | None = None
    return_token_offsets: bool = False  # by the render endpoints
    routed_experts_prompt_start: Annotated[int, limits.number("routed_experts_prompt_start")] = 0
    return_weight_versions: bool = False

    @property
    def routed_experts_start(self) -> int | None:
        """Returns where the routed experts of the answer begin, or None: streams do not have them."""
        return None if self.stream else self.routed_experts_prompt_start

    def check_stream(self) -> None:
        """Raises ``RequestError`` for fields that need the other value of ``stream``."""
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "not available when streaming")
        if self.stream and self.routed_experts_prompt_start:
            raise invalid("routed_experts_prompt_start", "not available when streaming")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "requires stream to be true")

    def take_defaults(self, config: ServerConfig) -> None:
        """Applies ``--enable-force-include-usage`` and ``--return-tokens-as-token-ids``, as vLLM does."""
        if config.force_usage and self.stream:
            self.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
        if "return_tokens_as_token_ids" not in self.model_fields_set:
            self.return_tokens_as_token_ids = config.tokens_as_ids


def parse(
    model: type[Model],
    data: Mapping[str, Any],
    harmless: Mapping[str, str] = {},
    refused: Mapping[str, Refusal] = {},
) -> Model:
    """Validates a body. Raises ``RequestError`` if a field is unsupported or invalid."""
    return parse_model(model, triage(data, model.model_fields, harmless, refused))


def triage(
    data: Mapping[str, Any],
    honoured: Iterable[str],
    harmless: Mapping[str, str],
    refused: Mapping[str, Refusal],
    path: str = "",
) -> dict[str, Any]:
    """Returns the honoured keys of a body, without nulls. Raises ``RequestError`` for a refused key.

    ``path``: of an object within the body, ending with a dot.
    """
    known = set(honoured)
    kept: dict[str, Any] = {}
    for key, value in data.items():
        if key in known:
            if value is not None:
                kept[key] = value
        elif key in refused:
            _check_refused(path + key, value, refused[key])
        elif key not in harmless:
            unknown_field(path + key, itertools.chain(known, harmless, refused))
    return kept


def _check_refused(key: str, value: Any, refusal: Refusal) -> None:
    if value is not None and value not in refusal.neutral:
        raise RequestError(f"'{key}': {refusal.reason}", param=key, code=refusal.code)
