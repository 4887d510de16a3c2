"""ONE row for each sampling number: type, range of the engine, of HTTP and of ``LLM``, default, meaning.

Whatever checks, copies or documents a sampling number reads this table: the engine's bounds, the request
models and their documents, ``SamplingParams``, ``generation_config.json`` and its override, the flags of
``chorale bench serve``. Imports nothing.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
VOCAB_SIZE = 201088
MAX_LOGPROBS = 20  # alternatives at each position
MAX_LOGPROB_TOKEN_IDS = 128  # named tokens whose log-probabilities a request may ask for, as in vLLM
MAX_CHOICES = 16_384  # per request in the engine; HTTP allows far fewer

Number = int | float


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from ``low`` to ``high``, both included; ``above`` excludes ``low``."""

    low: Number
    high: Number
    above: bool = False

    def holds(self, value: Number) -> bool:
        """Returns whether the range contains a value; no range contains NaN."""
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        low, high = (f"{int(n) if n == int(n) else n}" for n in (self.low, self.high))
        return f"above {low} and at most {high}" if self.above else f"from {low} to {high}"


@dataclass(frozen=True, slots=True)
class SamplingField:
    """``engine``: the range of the device; ``http`` and ``llm``: the ranges of requests, if they differ.

    ``llm`` also applies to ``generation_config.json``, and ``http`` to ``--override-generation-config``.
    """

    type: Literal["integer", "number"]
    engine: Range
    default: Number | None
    doc: str
    _: KW_ONLY
    http: Range | None = None
    llm: Range | None = None
    llm_default: Number | None = None  # if it differs from ``default``
    without: str = ""  # describes the default where ``default`` cannot
    generation: str | None = None  # name in generation_config.json, if it can be set there
    in_summary: bool = True  # summaries of a compaction use the request's value
    each: bool = False  # the range applies to each value of a dictionary

    @property
    def http_range(self) -> Range:
        return self.http or self.engine

    @property
    def llm_range(self) -> Range:
        return self.llm or self.engine

    @property
    def http_default(self) -> str:
        """Returns the default of a request, in words."""
        if self.without or self.default is None:
            return self.without or "none"
        return f"generation_config.json, or {self.default:g}" if self.generation else f"{self.default:g}"


_COUNT, _FRACTION, _PENALTY = Range(0, INT32_MAX), Range(0, 1), Range(-2, 2)
_LOGPROBS = Range(0, MAX_LOGPROBS)

# HTTP keeps OpenAI's bounds; LLM allows what the engine can do. One line per row, to be read by column.
# fmt: off
SAMPLING_FIELDS: dict[str, SamplingField] = {
    "temperature": SamplingField(
        "number", Range(0, 1e6), 1.0, "0 is greedy",
        http=Range(0, 2), generation="temperature"),
    "top_p": SamplingField(
        "number", Range(0, 1, above=True), 1.0, "probability mass of the likeliest tokens to keep",
        generation="top_p"),
    "top_k": SamplingField(  # the engine receives 0 for -1
        "integer", _COUNT, 0, "number of likeliest tokens to keep; 0 and -1 keep all",
        http=Range(-1, VOCAB_SIZE), llm=Range(-1, INT32_MAX), generation="top_k"),
    "min_p": SamplingField(
        "number", _FRACTION, 0.0, "minimum probability, relative to the likeliest token; applied first",
        generation="min_p"),
    "presence_penalty": SamplingField(
        "number", _PENALTY, 0.0, "subtracted once a token has appeared",
        generation="presence_penalty", in_summary=False),
    "frequency_penalty": SamplingField(
        "number", _PENALTY, 0.0, "subtracted for each appearance",
        generation="frequency_penalty", in_summary=False),
    "repetition_penalty": SamplingField(
        "number", Range(0, 1e6, above=True), 1.0, "1 has no effect",
        http=Range(0, 2, above=True), generation="repetition_penalty", in_summary=False),
    "seed": SamplingField(
        "integer", Range(-INT64_MAX - 1, INT64_MAX), None,
        "choice 0 of n uses the seed, the others a hash of it and their index"),
    "logit_bias": SamplingField(
        "number", Range(-1e6, 1e6), None, "added to one token's logit",
        http=Range(-100, 100), in_summary=False, each=True),
    "max_tokens": SamplingField(  # 0: only score the prompt
        "integer", _COUNT, None, "output tokens; clamped to the context window",
        http=Range(1, INT32_MAX), llm=Range(1, INT32_MAX), llm_default=16, generation="max_new_tokens",
        without="generation_config.json's max_new_tokens, or the window", in_summary=False),
    "min_tokens": SamplingField(
        "integer", _COUNT, 0, "minimum number of tokens before a stop token or stop string",
        in_summary=False),
    "n": SamplingField(
        "integer", Range(1, MAX_CHOICES), 1, "choices",
        http=Range(1, 16), in_summary=False),
    "logprobs": SamplingField(
        "integer", _LOGPROBS, None, "completions: alternatives per token",
        in_summary=False),
    "prompt_logprobs": SamplingField(
        "integer", _LOGPROBS, None, "alternatives per prompt token",
        in_summary=False),
}
# fmt: on

# Name in generation_config.json and in --override-generation-config -> field.
GENERATION = {field.generation: name for name, field in SAMPLING_FIELDS.items() if field.generation}
# Request fields that a checkpoint sets under the same name.
CHOSEN_BY_MODEL = tuple(name for name, field in SAMPLING_FIELDS.items() if field.generation == name)
IN_SUMMARY = tuple(name for name, field in SAMPLING_FIELDS.items() if field.in_summary)
