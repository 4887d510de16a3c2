"""The table of all numbers in requests: type, minimum, maximum, default, meaning.

The request models, the OpenAPI description, docs/reference/api-fields.md and the boundary tests all use
``LIMITS`` (single values) and ``SIZES`` (counts and lengths). Every numeric field is listed here.
Sampling numbers come from ``chorale/config/sampling_fields.py``.

Use in a request model::

    temperature: Annotated[float, limits.number("temperature")] | None = None
    stop: Annotated[list[str], limits.items("stop")] | None = None

``number`` accepts JSON numbers only: no booleans, numeric strings, NaN, infinity or 10**30. An integer field
accepts 5.0 as 5, since some clients send all numbers as floats, but not 5.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from annotated_types import MaxLen
from pydantic import AfterValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from chorale.config.sampling_fields import (
    INT32_MAX,
    INT64_MAX,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    SAMPLING_FIELDS,
    VOCAB_SIZE,
    Number,
)
from chorale.errors import RequestError
from chorale.harmony.json_shape import LARGEST


@dataclass(frozen=True, slots=True)
class Limit:
    """A numeric field. ``exclusive_min``: the minimum itself is not allowed."""

    type: Literal["integer", "number"]
    min: Number
    max: Number
    doc: str
    default: str = "none"
    exclusive_min: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """Returns the JSON Schema of one value."""
        low = "exclusiveMinimum" if self.exclusive_min else "minimum"
        return {"type": self.type, low: self.min, "maximum": self.max}

    def check(self, value: object) -> Number:
        """Returns the value as int or float. Raises pydantic's error of the matching kind."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PydanticKnownError("int_type" if self.type == "integer" else "float_type")
        if isinstance(value, float) and not math.isfinite(value):
            raise PydanticKnownError("finite_number")
        if value < self.min:
            raise PydanticKnownError("greater_than_equal", {"ge": self.min})
        if self.exclusive_min and value == self.min:
            raise PydanticKnownError("greater_than", {"gt": self.min})
        if value > self.max:
            raise PydanticKnownError("less_than_equal", {"le": self.max})
        if self.type == "number":
            return float(value)
        if value != int(value):
            raise PydanticKnownError("int_from_float")
        return int(value)


@dataclass(frozen=True, slots=True)
class Size:
    """A count or length of at most ``max`` ``unit``."""

    max: int
    unit: str
    doc: str


def _integer(low: int, high: int, doc: str, default: str = "none") -> Limit:
    return Limit("integer", low, high, doc, default)


# Limits of the sampling fields, whose ranges are defined in ``chorale/config/sampling_fields.py``.
_SAMPLING = {
    name: Limit(
        field.type,
        field.http_range.low,
        field.http_range.high,
        field.doc,
        field.http_default,
        field.http_range.above,
    )
    for name, field in SAMPLING_FIELDS.items()
}

LIMITS: dict[str, Limit] = {
    **_SAMPLING,
    "token_id": _integer(0, VOCAB_SIZE - 1, "a token id in a prompt, stop_token_ids, logit_bias, ..."),
    # lengths
    "max_completion_tokens": replace(_SAMPLING["max_tokens"], doc="same as max_tokens"),
    "max_output_tokens": replace(
        _SAMPLING["max_tokens"], doc="like max_tokens, for all rounds of tool calls together"
    ),
    "completions.max_tokens": _integer(0, INT32_MAX, "with echo, 0 only scores the prompt", "16"),
    "thinking_token_budget": _integer(0, INT32_MAX, "reasoning tokens after which the answer is forced"),
    # choices and details
    "best_of": replace(_SAMPLING["n"], doc="must equal n", default="n"),
    "top_logprobs": _integer(0, MAX_LOGPROBS, "alternatives per token", "0"),
    "max_tool_calls": _integer(0, INT32_MAX, "built-in calls within one response"),
    "compact_threshold": _integer(
        1, INT32_MAX, "prompt tokens above which a conversation is summarized", "3/4 of the window"
    ),
    # scheduling
    "priority": _integer(
        -INT32_MAX - 1, INT32_MAX, "lower values run first under --scheduling-policy priority", "0"
    ),
    "routed_experts_prompt_start": _integer(
        0, INT32_MAX, "first prompt token whose routed experts are returned", "0"
    ),
    # answers of /inference/v1/generate
    "prompt_tokens": _integer(0, INT32_MAX, "tokens of a prompt or an answer in the usage"),
    "index": _integer(0, 15, "place of a choice among those of its prompt"),
    "logprob": Limit("number", -1e4, 0, "a log-probability"),
    "rank": _integer(1, VOCAB_SIZE + 1, "place of a token among all by probability"),
    # lists and streams
    "limit": _integer(1, 100, "entries per page", "20"),
    "files.limit": _integer(1, 10_000, "files per page", "10000"),
    "expires_after.seconds": _integer(3_600, 2_592_000, "lifetime of a file, also in output_expires_after"),
    "starting_after": _integer(0, INT64_MAX, "sequence number after which a stream resumes", "0"),
}

SIZES: dict[str, Size] = {
    "stop": Size(16, "strings", "stop strings"),
    "stop_bytes": Size(256, "bytes", "length of a stop string in UTF-8"),
    "stop_token_ids": Size(256, "ids", "additional stop tokens"),
    "logit_bias": Size(1024, "entries", "biased tokens"),
    "logprob_token_ids": Size(
        MAX_LOGPROB_TOKEN_IDS, "ids", "tokens whose log-probabilities are returned at each position"
    ),
    "allowed_token_ids": Size(VOCAB_SIZE, "ids", "tokens that may be sampled"),
    "bad_words": Size(256, "strings", "strings that must not appear in the output"),
    "tools": Size(128, "tools", "declared tools"),
    "metadata": Size(16, "entries", "metadata keys"),
    "metadata_key": Size(64, "characters", "length of a metadata key"),
    "metadata_value": Size(512, "characters", "length of a metadata value"),
    "messages": Size(16_384, "messages", "messages in a chat"),
    "input": Size(16_384, "items", "items in a Responses input"),
    "conversation_items": Size(20, "items", "items added to a conversation at once"),
    "prompts": Size(256, "prompts", "prompts in a completions request"),
    "candidates": Size(MAX_LOGPROB_TOKEN_IDS + 1, "tokens", "log-probabilities at one position"),
    "request_ids": Size(1024, "ids", "requests to abort"),
    "prompt_tokens": Size(196_608, "ids", "length of a prompt, as ids or text, before the context check"),
    "json_values": Size(
        LARGEST.values,
        "values",
        "objects, arrays, strings and numbers in a body; empty containers count twice",
    ),
    "json_strings": Size(LARGEST.strings, "strings", "strings in a body, including member names"),
    "json_containers": Size(LARGEST.containers, "containers", "objects and arrays in a body"),
    "json_members": Size(LARGEST.members, "members", "members of one object in a body"),
    "json_escapes": Size(LARGEST.escapes, "escapes", "backslash sequences in the strings of a body"),
    "thought_tokens": Size(1_048_576, "ids", "reasoning tokens that a request sends back"),
    "prompt_scores": Size(
        262_144, "entries", "prompt tokens x (prompt_logprobs + 1); with echo, x (logprobs + 1)"
    ),
    "routed_experts": Size(524_288, "positions", "prompt tokens x n whose routed experts an answer contains"),
    "tool_name": Size(64, "characters", "length of a function name"),
    "identifier": Size(512, "characters", "user, cache_salt, prompt_cache_key, ids, ..."),
}


@dataclass(frozen=True, slots=True)
class _NumberMarker:
    """Pydantic metadata that checks one ``Limit``."""

    limit: Limit

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.limit.check)

    def __get_pydantic_json_schema__(
        self, _schema: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return self.limit.schema


def number(name: str) -> _NumberMarker:
    """Returns metadata for ``Annotated[int | float, ...]``: the range of ``LIMITS[name]``."""
    return _NumberMarker(LIMITS[name])


def items(name: str) -> MaxLen:
    """Returns metadata for lists, dicts and strings: at most ``SIZES[name].max`` elements."""
    return MaxLen(SIZES[name].max)


def utf8_bytes(name: str) -> AfterValidator:
    """Returns metadata for a string: at most ``SIZES[name].max`` bytes in UTF-8."""
    size = SIZES[name]

    def check(text: str) -> str:
        if len(text.encode("utf-8", "surrogatepass")) > size.max:
            raise PydanticCustomError(
                "string_too_long", "String should have at most {max} bytes", {"max": size.max}
            )
        return text

    return AfterValidator(check)


def check_scores(num_prompt_tokens: int, prompt_logprobs: int | None) -> None:
    """Raises ``RequestError`` if a response would contain too many log-probabilities of the prompt."""
    most = SIZES["prompt_scores"].max
    if prompt_logprobs is not None and num_prompt_tokens * (prompt_logprobs + 1) > most:
        raise RequestError(
            f"prompt_logprobs: {num_prompt_tokens} prompt tokens with {prompt_logprobs} alternatives each "
            f"are more than the {most} log-probabilities that a response may contain",
            param="prompt_logprobs",
            code="above_max_value",
        )
