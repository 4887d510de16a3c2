"""Request fields: what every generating endpoint shares, and the rule that none is accepted and ignored.

A top-level key is honoured (a field of the request model), harmless (accepted without effect, with the
reason in a table), refused by name, or unknown (400, with the nearest name). ``docs/api.md`` and the
boundary tests read the same tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from chorale.api import limits
from chorale.errors import RequestError

TokenId = Annotated[int, limits.token_id()]
Metadata = dict[Annotated[str, limits.items("metadata_key")], Annotated[str, limits.items("metadata_value")]]
StopString = Annotated[str, Field(min_length=1), limits.utf8_bytes("stop_bytes")]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field we know and cannot honour. ``neutral`` values ask for nothing and are let through.

    ``code``: of the error, where clients know one for it.
    """

    reason: str
    neutral: tuple[Any, ...] = (False, [], {}, "")
    code: str = "unsupported_parameter"


HARMLESS: dict[str, str] = {
    "user": "an end-user label; nothing here depends on it",
    "safety_identifier": "an end-user label; nothing here depends on it",
    "metadata": "labels for stored objects; these are not stored",
    "store": "these are not stored",
    "service_tier": "there is one tier; the answer says `default`",
    "prompt_cache_key": "the prefix cache finds equal prefixes by itself",
    "prompt_cache_options": "the prefix cache finds equal prefixes by itself",
    "prompt_cache_retention": "the prefix cache finds equal prefixes by itself",
    "request_id": "ids are ours; name a request with the X-Request-Id header",
    "session_id": "a label for routers; the prefix cache finds equal prefixes by itself",
    "truncation_side": "the prompt is never cut",
    "spaces_between_special_tokens": "special tokens are not part of the text",
    "detokenize": "text is always returned",
    "guided_decoding_backend": "there is one; it supports every kind",
}

REFUSED: dict[str, Refusal] = {
    "logits_processors": Refusal("code from a request is never run"),
    "use_beam_search": Refusal("beam search is not offered"),
    "length_penalty": Refusal("beam search is not offered", neutral=(1, 1.0)),
    "early_stopping": Refusal("beam search is not offered"),
    "kv_transfer_params": Refusal("there is no disaggregated prefill"),
    "ec_transfer_params": Refusal("there is no disaggregated prefill"),
    "vllm_xargs": Refusal("there are no engine extensions"),
    "truncate_prompt_tokens": Refusal("the prompt is never cut; send one that fits", neutral=()),
    "logprob_token_ids": Refusal("log-probabilities are those of the likeliest tokens"),
    "repetition_detection": Refusal("answers are not watched for repetition; see repetition_penalty"),
    "stream_interval": Refusal("the server decides it: --stream-interval"),
    "watermarking": Refusal("answers are not watermarked"),
    "guided_whitespace_pattern": Refusal(
        "JSON is written with one space or line break at most, where it may"
    ),
    "structural_tag": Refusal("the frames of a turn are harmony's"),
    "mm_processor_kwargs": Refusal("the model takes text only"),
    "media_io_kwargs": Refusal("the model takes text only"),
    "prompt_embeds": Refusal("prompts are text or token ids"),
}


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    """``include_obfuscation`` is accepted: no obfuscation is ever added."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(BaseModel):
    """The fields by which a request chooses tokens; OpenAI's names, then vLLM's. None: the default."""

    model_config = ConfigDict(extra="forbid", strict=True)

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
    priority: Annotated[int, limits.number("priority")] | None = None
    cache_salt: Annotated[str, Field(min_length=1), limits.items("identifier")] | None = None


class StructuredFields(SamplingFields):
    """What the answer must be, in vLLM's names, new and old (``structured.py`` reads them)."""

    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def triage(
    data: Mapping[str, Any],
    honoured: Iterable[str],
    harmless: Mapping[str, str],
    refused: Mapping[str, Refusal],
) -> dict[str, Any]:
    """The honoured keys of a body, nulls left out. Raises ``RequestError`` for the first other one."""
    known = set(honoured)
    kept: dict[str, Any] = {}
    for key, value in data.items():
        if key in known:
            if value is not None:
                kept[key] = value
        elif key in refused:
            _check_refused(key, value, refused[key])
        elif key not in harmless:
            raise _unknown(key, known | set(harmless) | set(refused))
    return kept


def _check_refused(key: str, value: Any, refusal: Refusal) -> None:
    if value is not None and value not in refusal.neutral:
        raise RequestError(f"'{key}': {refusal.reason}", param=key, code=refusal.code)


def _unknown(key: str, names: set[str]) -> RequestError:
    shown = key[:64]
    near = difflib.get_close_matches(shown, sorted(names), n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return RequestError(f"unknown parameter '{shown}'{hint}", param=shown, code="unknown_parameter")


def markdown_table(
    model: type[BaseModel], harmless: Mapping[str, str], refused: Mapping[str, Refusal]
) -> str:
    """What becomes of each field of one endpoint, for ``docs/api.md``."""
    rows = ["| field | what becomes of it |", "|---|---|"]
    rows += [f"| `{name}` | honoured |" for name in model.model_fields]
    rows += [f"| `{name}` | accepted without effect: {reason} |" for name, reason in harmless.items()]
    rows += [f"| `{name}` | refused (400): {refusal.reason} |" for name, refusal in refused.items()]
    return "\n".join(rows) + "\n"
