"""Request fields to a SamplingSpec: hard defaults, then generation_config.json, then the request.

The length rule: a request may ask for more output than fits (evals ask for 131,072 tokens) and gets what
fits; a prompt that leaves no room for one token is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict

from chorale.client.base import EngineInfo
from chorale.config.sampling_fields import CHOSEN_BY_MODEL, SAMPLING_FIELDS
from chorale.config.seeds import choice_seed
from chorale.engine.types import SamplingSpec
from chorale.errors import ContextLengthError, RequestError, invalid
from chorale.harmony.text import encode_words
from chorale.harmony.vocab import Vocabulary

_MAX_NAMED = 20  # wrong entries in one error


class TurnFields(Protocol):
    """The fields of a request that a turn reads, besides the numbers of ``CHOSEN_BY_MODEL``.

    None: the default.
    """

    @property
    def logit_bias(self) -> Mapping[str, float] | Mapping[int, float] | None: ...
    @property
    def allowed_token_ids(self) -> Sequence[int] | None: ...
    @property
    def bad_words(self) -> Sequence[str] | None: ...
    @property
    def min_tokens(self) -> int | None: ...
    @property
    def ignore_eos(self) -> bool | None: ...
    @property
    def stop_token_ids(self) -> Sequence[int] | None: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def stop(self) -> Sequence[str] | None: ...
    @property
    def include_stop_str_in_output(self) -> bool | None: ...
    @property
    def priority(self) -> int | None: ...


class Details(TypedDict, total=False):
    """What a request asks for besides one text, and the names of its fields in errors."""

    n: int  # by default 1
    logprobs: int | None
    logprob_token_ids: Sequence[int] | None  # score these tokens instead of the ``logprobs`` likeliest
    prompt_logprobs: int | None
    routed_experts_start: int | None  # the position of the prompt from which on the answer has them
    prompt_param: str  # by default "messages"
    logprobs_param: str  # by default "top_logprobs"


def resolve_sampling(
    fields: TurnFields,
    info: EngineInfo,
    vocab: Vocabulary,
    *,
    num_prompt_tokens: int,
    max_tokens: int | None,
    details: Details,
) -> SamplingSpec:
    """``max_tokens`` of None: up to the window. Raises ``ContextLengthError`` or ``RequestError``."""
    scored, prompt_logprobs = details.get("logprob_token_ids"), details.get("prompt_logprobs")
    logprobs = 0 if scored else details.get("logprobs")
    logprobs_param = details.get("logprobs_param", "top_logprobs")
    for param, number in ((logprobs_param, logprobs), ("prompt_logprobs", prompt_logprobs)):
        if number is not None and number > info.max_logprobs:
            raise invalid(param, f"this server gives at most {info.max_logprobs} (--max-logprobs)")
    limit = fit_max_tokens(info, num_prompt_tokens, max_tokens, details.get("prompt_param", "messages"))
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens ({min_tokens}) is above max_tokens ({max_tokens})", param="min_tokens"
        )
    most = 0 if info.routed_experts is None else num_prompt_tokens
    start = details.get("routed_experts_start")
    if start is not None and not 0 <= start <= most:
        why = "the length of the prompt" if most else "without --enable-return-routed-experts"
        param = "routed_experts_prompt_start"
        raise RequestError(f"{param} must be from 0 to {most}, {why}", param=param)
    return SamplingSpec(
        n=details.get("n", 1),
        **_chosen(fields, info),
        logit_bias=_logit_bias(fields.logit_bias, info.vocab_size),
        allowed_token_ids=_token_ids(fields.allowed_token_ids),
        bad_words=encode_words(fields.bad_words or [], vocab),
        min_tokens=min(min_tokens, limit),
        max_tokens=limit,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=_token_ids(fields.stop_token_ids) or (),
        seed=None if fields.seed is None else choice_seed(fields.seed, 0),
        logprobs=logprobs,
        logprob_token_ids=_token_ids(scored) or (),
        prompt_logprobs=prompt_logprobs,
        routed_experts_start=None if info.routed_experts is None else start,
    )


def _chosen(fields: TurnFields, info: EngineInfo) -> dict[str, Any]:
    """Returns the request's numbers of ``CHOSEN_BY_MODEL``, else those of generation_config.json.

    A number that neither sets is left out.
    """
    chosen: dict[str, Any] = {}
    for name in CHOSEN_BY_MODEL:
        value = getattr(fields, name)
        if value is None:
            value = info.default_sampling.get(name)
        if value is not None:
            chosen[name] = int(value) if SAMPLING_FIELDS[name].type == "integer" else value
    if "top_k" in chosen:
        chosen["top_k"] = max(0, chosen["top_k"])  # -1 also means "all"
    return chosen


def fit_max_tokens(info: EngineInfo, num_prompt_tokens: int, requested: int | None, prompt_param: str) -> int:
    """Returns the output limit: the requested number, at most the rest of the context window."""
    window = info.max_model_len
    what = f"This model's maximum context length is {window} tokens"  # LiteLLM matches this text
    if 0 < info.num_kv_tokens < window:
        window = info.num_kv_tokens
        what += f", of which the KV cache holds {window}"
    room = window - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"{what}, prompt and answer together; the prompt has {num_prompt_tokens} tokens",
            param=prompt_param,
        )
    if requested is None:
        default = info.default_sampling.get("max_new_tokens")
        return room if default is None else max(1, min(room, int(default)))
    return min(room, requested)


def _token_ids(ids: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(dict.fromkeys(map(int, ids)))


def _logit_bias(bias: Mapping[str, float] | Mapping[int, float] | None, vocab_size: int) -> dict[int, float]:
    """Returns the biases by token id; JSON keys are strings."""
    resolved: dict[int, float] = {}
    wrong: list[str] = []
    for key, value in ((str(key), value) for key, value in (bias or {}).items()):
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
        if 0 <= token_id < vocab_size:
            resolved[token_id] = value
        else:
            wrong.append(f"'{key[:32]}'")
    if wrong:
        more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        named = ", ".join(wrong[:_MAX_NAMED])
        raise invalid("logit_bias", f"{named}{more}: not token ids (0 to {vocab_size - 1})")
    return resolved
