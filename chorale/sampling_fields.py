"""ONE row for each sampling number: type, range of the engine, of HTTP and of ``LLM``, default, meaning.

Whatever checks, copies or documents a sampling number reads this table: the engine's bounds, the request
models and their documents, ``SamplingParams``, ``generation_config.json`` and its override, the flags of
``chorale bench serve``. Imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
VOCAB_SIZE = 201088
MAX_LOGPROBS = 20  # alternatives at each position
MAX_PROMPT_SCORES = 262_144  # log-probabilities of the prompt that one answer may hold
MAX_CHOICES = 16_384  # of one request, for the engine; HTTP allows far fewer

Number = int | float


@dataclass(frozen=True, slots=True)
class Range:
    """``low`` to ``high``, both included unless ``above``: then ``low`` itself is not."""

    low: Number
    high: Number
    above: bool = False

    def holds(self, value: Number) -> bool:
        """A NaN is in no range."""
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        return f"{'above' if self.above else 'from'} {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingField:
    """``engine``: what the device can do; ``http`` and ``llm``: what requests may have, where it differs."""

    type: Literal["integer", "number"]
    engine: Range
    http: Range | None = None
    llm: Range | None = None
    default: Number | None
    llm_default: Number | None = None  # where it is not ``default``
    without: str = ""  # what a request without it gets, where ``default`` does not say it
    doc: str
    generation: str | None = None  # its name in generation_config.json, which may set it
    in_summary: bool = True  # the summary of a compaction samples with the request's value
    each: bool = False  # a range of each value of a dictionary

    @property
    def http_range(self) -> Range:
        return self.http or self.engine

    @property
    def llm_range(self) -> Range:
        return self.llm or self.engine

    @property
    def http_default(self) -> str:
        """What a request gets that does not have the field, in words."""
        if self.without or self.default is None:
            return self.without or "none"
        return f"generation_config.json, or {self.default:g}" if self.generation else f"{self.default:g}"


_COUNT = Range(0, INT32_MAX)
_FRACTION = Range(0, 1)
_PENALTY = Range(-2, 2)
_LOGPROBS = Range(0, MAX_LOGPROBS)

# HTTP keeps OpenAI's bounds; LLM allows what the engine can do.
SAMPLING_FIELDS: dict[str, SamplingField] = {
    "temperature": SamplingField(
        type="number",
        engine=Range(0, 1e6),
        http=Range(0, 2),
        default=1.0,
        doc="0 is greedy",
        generation="temperature",
    ),
    "top_p": SamplingField(
        type="number",
        engine=Range(0, 1, above=True),
        default=1.0,
        doc="nucleus mass",
        generation="top_p",
    ),
    "top_k": SamplingField(
        type="integer",
        engine=_COUNT,
        http=Range(-1, VOCAB_SIZE),  # -1 becomes 0 on the way to the engine
        llm=Range(-1, INT32_MAX),
        default=0,
        doc="number of likeliest tokens to keep; 0 and -1 keep all",
        generation="top_k",
    ),
    "min_p": SamplingField(
        type="number",
        engine=_FRACTION,
        default=0.0,
        doc="minimum probability, relative to the likeliest token",
        generation="min_p",
    ),
    "presence_penalty": SamplingField(
        type="number",
        engine=_PENALTY,
        default=0.0,
        doc="subtracted once a token has appeared",
        generation="presence_penalty",
        in_summary=False,
    ),
    "frequency_penalty": SamplingField(
        type="number",
        engine=_PENALTY,
        default=0.0,
        doc="subtracted for each appearance",
        generation="frequency_penalty",
        in_summary=False,
    ),
    "repetition_penalty": SamplingField(
        type="number",
        engine=Range(0, 1e6, above=True),
        http=Range(0, 2, above=True),
        default=1.0,
        doc="1 has no effect",
        generation="repetition_penalty",
        in_summary=False,
    ),
    "seed": SamplingField(
        type="integer",
        engine=Range(-INT64_MAX - 1, INT64_MAX),
        default=None,
        doc="choice i of n uses seed + i",
    ),
    "logit_bias": SamplingField(
        type="number",
        engine=Range(-1e6, 1e6),
        http=Range(-100, 100),
        default=None,
        doc="added to one token's logit",
        in_summary=False,
        each=True,
    ),
    "max_tokens": SamplingField(
        type="integer",
        engine=_COUNT,  # 0 computes the prompt alone, to score it
        http=Range(1, INT32_MAX),
        llm=Range(1, INT32_MAX),
        default=None,
        llm_default=16,
        without="the window",
        doc="output tokens; clamped to the context window",
        generation="max_new_tokens",
        in_summary=False,
    ),
    "min_tokens": SamplingField(
        type="integer",
        engine=_COUNT,
        default=0,
        doc="minimum number of tokens before a stop token or stop string",
        in_summary=False,
    ),
    "n": SamplingField(
        type="integer",
        engine=Range(1, MAX_CHOICES),
        http=Range(1, 16),
        default=1,
        doc="choices",
        in_summary=False,
    ),
    "logprobs": SamplingField(
        type="integer",
        engine=_LOGPROBS,
        default=None,
        doc="completions: alternatives per token",
        in_summary=False,
    ),
    "prompt_logprobs": SamplingField(
        type="integer",
        engine=_LOGPROBS,
        default=None,
        doc="alternatives per prompt token",
        in_summary=False,
    ),
}

# Names of generation_config.json, as --override-generation-config may give them -> the fields that they set.
GENERATION = {field.generation: name for name, field in SAMPLING_FIELDS.items() if field.generation}
# Request fields that a checkpoint sets under the same name.
CHOSEN_BY_MODEL = tuple(name for name, field in SAMPLING_FIELDS.items() if field.generation == name)
IN_SUMMARY = tuple(name for name, field in SAMPLING_FIELDS.items() if field.in_summary)
