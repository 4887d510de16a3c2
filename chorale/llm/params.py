"""SamplingParams with vLLM's names and defaults. Values are checked on construction."""

from __future__ import annotations

import copy
import difflib
import enum
import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from chorale.client.base import EngineInfo
from chorale.config.options.vllm_flags import read_names
from chorale.config.sampling_fields import GENERATION, MAX_CHOICES, MAX_LOGPROB_TOKEN_IDS, SAMPLING_FIELDS
from chorale.errors import RequestError
from chorale.grammar.constraint import Constraint
from chorale.grammar.matcher import check_constraint
from chorale.grammar.place import explained
from chorale.llm.options import listed
from chorale.requests.formats import constraint_of

_LINES = read_names("SamplingParams")
REFUSED = {line.name: line.reason for line in _LINES if line.treatment == "refused"}
# Arguments of vLLM's methods that may only have a value that asks for nothing.
UNUSED = {
    "priority": "prompts run in the order in which they are given",
    "mm_processor_kwargs": "gpt-oss reads text only",
    "text_pair": "gpt-oss has no pairs of texts",
    "tokenization_kwargs": "get_tokenizer().encode has options; pass the ids",
    "continue_final_message": "the server's chat API has it",
    **dict.fromkeys(("chat_template", "documents"), "messages are always rendered as harmony"),
    **dict.fromkeys(("padding", "truncation", "max_length", "return_tensors"), "change the lists yourself"),
}


def check_names(
    owner: str, given: Mapping[str, Any], known: Collection[str], refused: Mapping[str, str] = REFUSED
) -> None:
    """Raises ``TypeError`` for an unknown name, with the nearest known one, ``ValueError`` for a name in
    ``refused`` whose value asks for something, with the reason."""
    for name, value in given.items():
        if name in known:
            continue
        if name in refused:
            if len(value) if hasattr(value, "__len__") else value:
                raise ValueError(f"{owner}: {name} is not supported: {refused[name]}")
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"{owner} has no argument {name!r}{hint}")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The constraint of the output: exactly one field is set. ``json``: a schema, as an object or a string;
    ``grammar``: Lark or GBNF."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if len(self._given()) != 1:
            raise ValueError(f"structured_outputs needs exactly one of {', '.join(vars(self))}")

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value not in (None, False)}

    def constraint(self) -> Constraint:
        """Return the constraint. Raises ``ValueError`` if it cannot be enforced."""
        ((way, value),) = self._given().items()
        try:
            if way == "choice" and not isinstance(value, str):  # list() would split a string
                value = list(value)
            found = constraint_of(way, value, f"structured_outputs.{way}")
        except RequestError as error:
            raise ValueError(error.message) from None
        check_compiles(found)
        return found


def check_compiles(constraint: Constraint) -> None:
    """Raises ``ValueError``, naming the field, if the constraint does not compile."""
    try:
        _compiled(constraint)
    except ValueError as error:
        raise ValueError(explained(constraint, str(error))) from None


@functools.lru_cache(maxsize=64)
def _compiled(constraint: Constraint) -> None:
    """Compile the constraint; repeated calls are free. Raises ``ValueError``."""
    check_constraint(constraint)


class RequestOutputKind(enum.Enum):
    """vLLM's forms of streamed outputs. ``LLM`` returns finished outputs, whatever the kind."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(kw_only=True)
class _Fields:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    routed_experts_prompt_start: int = 0
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # has no effect: harmony's special tokens carry no spaces
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    skip_reading_prefix_cache: bool | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False


class SamplingParams(_Fields):
    """Sampling parameters, with vLLM's names and defaults.

    A bad value is a ``ValueError`` or a ``TypeError`` that names the argument, also if it is assigned later.
    """

    if not TYPE_CHECKING:  # type checkers and editors see the arguments of _Fields

        def __init__(self, **given: Any) -> None:
            names = [field.name for field in fields(_Fields)]
            check_names("SamplingParams", given, names)
            vars(self).update({field.name: field.default for field in fields(_Fields)})
            vars(self).update({name: _plain(name, given[name]) for name in names if name in given})
            _check(self)

        def __setattr__(self, name: str, value: Any) -> None:
            before = dict(vars(self))
            check_names("SamplingParams", {name: value}, tuple(before))
            vars(self).update({name: _plain(name, value)} if name in before else {})
            try:
                _check(self)
            except ValueError:
                vars(self).update(before)
                raise

    @classmethod
    def from_defaults(cls, defaults: dict[str, float], **given: Any) -> SamplingParams:
        """Return parameters from ``given`` and, for missing names, from ``generation_config.json``."""
        known: dict[str, Any] = {GENERATION[name]: defaults[name] for name in defaults if name in GENERATION}
        for name in known.keys() & INTEGERS:
            known[name] = int(known[name])
        return cls(**{**known, **given})

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Return parameters from ``given``, where None means the default. Keys of ``logit_bias`` may be
        strings, and its values are limited to -100 to 100."""
        bias = given.get("logit_bias")
        if bias is not None:
            try:
                given["logit_bias"] = {int(key): min(100.0, max(-100.0, bias[key])) for key in bias}
            except (TypeError, ValueError):
                raise ValueError("logit_bias must map token ids to numbers") from None
        optional = ("max_tokens", "seed")  # None has a meaning, or is the default
        return cls(**{name: value for name, value in given.items() if value is not None or name in optional})

    def clone(self) -> SamplingParams:
        """Return a copy, which can be changed alone."""
        return copy.deepcopy(self)

    def constraint(self) -> Constraint | None:
        """Return the constraint of ``structured_outputs``. Raises ``ValueError`` or ``TypeError``."""
        wanted = self._wanted()
        return None if wanted is None else wanted.constraint()

    def _wanted(self) -> StructuredOutputsParams | None:
        given = self.structured_outputs
        if isinstance(given, Mapping):
            return StructuredOutputsParams(**given)
        if given is None or isinstance(given, StructuredOutputsParams):
            return given
        raise TypeError(f"structured_outputs must be StructuredOutputsParams or a mapping, not {given!r}")

    @property
    def priority(self) -> int:
        """The priority, 0 for every request: prompts run in the order in which they are given."""
        return 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def __repr__(self) -> str:
        changed = [
            f"{field.name}={value!r}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"SamplingParams({', '.join(changed)})"


# Meanings for ``LLM``; the others are those of SAMPLING_FIELDS.
_MEANINGS = {
    **{line.name: f"has no effect: {line.reason}" for line in _LINES if line.treatment == "no effect"},
    "n": "number of outputs for each prompt",
    "temperature": "how much chance decides; 0 always takes the likeliest token",
    "presence_penalty": "subtracted from the logits of tokens that have appeared in the output",
    "frequency_penalty": "subtracted from the logit of a token for each time it has appeared in the output",
    "repetition_penalty": "makes tokens of prompt and output less likely if above 1, more likely if below",
    "min_p": "minimum probability of a token, as a share of the likeliest token's; applied first",
    "seed": "makes the output repeatable; None: a new seed for each call",
    "max_tokens": "maximum number of output tokens, reasoning included; None: up to the context length",
    "logprobs": "number of likeliest tokens whose log-probabilities are returned at each position",
    "prompt_logprobs": "the same for the positions of the prompt",
    "routed_experts_prompt_start": "first prompt token whose routed experts are returned",
    "stop": "strings that end the output",
    "stop_token_ids": "token ids that end the output",
    "ignore_eos": "continue after the model has ended its answer",
    "detokenize": "False: return no text; stop strings then do not work",
    "skip_special_tokens": "leave special tokens out of the text of generate()",
    "include_stop_str_in_output": "keep the stop string at the end of the text",
    "logit_bias": "values to add to the logits of tokens, by token id",
    "allowed_token_ids": "generate these tokens only",
    "bad_words": "texts that must not be generated",
    "structured_outputs": "a schema, regular expression, list or grammar that the answer must match",
    "logprob_token_ids": "token ids whose log-probabilities are returned at each position, instead of the "
    f"likeliest ones (at most {MAX_LOGPROB_TOKEN_IDS})",
    "flat_logprobs": "return log-probabilities as FlatLogprobs: one list for each attribute, and few objects",
    "skip_reading_prefix_cache": "compute the whole prompt; its pages are cached all the same",
}


def sampling_arguments() -> list[tuple[str, str, object, str]]:
    """Returns name, type, default and meaning (with range) of each argument of ``SamplingParams``."""
    rows: list[tuple[str, str, object, str]] = []
    for field in fields(_Fields):
        number = SAMPLING_FIELDS.get(field.name)
        meaning = _MEANINGS.get(field.name) or (number.doc if number else "")
        has_range = number is not None and number.llm_range.high <= MAX_CHOICES
        meaning += f" ({number.llm_range})" if number and has_range else ""
        rows.append((field.name, str(field.type), field.default, meaning))
    return rows


SamplingParams.__signature__ = inspect.signature(_Fields)  # type: ignore[attr-defined]
SamplingParams.__doc__ = (
    f"{inspect.cleandoc(SamplingParams.__doc__ or '')}\n\nArguments:\n\n{listed(sampling_arguments())}\n"
)

# Parameters that are a single number; of these, the integers and those that may be None.
_NUMBERS = {name: field for name, field in SAMPLING_FIELDS.items() if not field.each}
INTEGERS = frozenset(name for name, field in _NUMBERS.items() if field.type == "integer")
INTEGERS |= {"routed_experts_prompt_start"}
_OPTIONAL = frozenset(name for name, field in _NUMBERS.items() if field.default is None)
_TEXTS = ("stop", "bad_words")
_IDS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")


def _plain(name: str, value: Any) -> Any:
    """Return ``value`` in the engine's form; numpy's numbers become Python's. Raises ``TypeError``.

    A value of a wrong type would fail later, in an engine step, and end all other prompts, too.
    """
    if name in _OPTIONAL and value is None:
        return None
    if name in INTEGERS:
        if name in ("logprobs", "prompt_logprobs") and value == -1:
            raise ValueError(
                f"{name}=-1 (the whole vocabulary) is not supported: name ids in logprob_token_ids"
            )
        if name == "seed" and value == -1:  # vLLM's spelling of "none"
            return None
        if not isinstance(value, Integral):
            raise TypeError(f"{name} must be an integer, not {value!r}")
        return int(value)
    if name in _NUMBERS:
        if not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, not {value!r}")
        return value if isinstance(value, int) else float(value)
    if name == "logit_bias" and value is not None:
        if not isinstance(value, Mapping) or not all(isinstance(bias, Real) for bias in value.values()):
            raise TypeError(f"logit_bias must map token ids to numbers, not {value!r}")
        return {
            int(token) if isinstance(token, Integral) else token: float(bias) for token, bias in value.items()
        }
    is_one = name == "stop" and isinstance(value, str)
    if name in _TEXTS and value is not None and not is_one and not _are_texts(value):
        raise TypeError(f"{name} must be a list of strings, not {value!r}")
    if name in _IDS and value is not None and (isinstance(value, str) or not isinstance(value, Collection)):
        raise TypeError(f"{name} must be a list of token ids, not {value!r}")
    return value


def _are_texts(value: object) -> bool:
    """Return whether ``value`` is a list of strings. A string does not count as one."""
    if isinstance(value, str) or not isinstance(value, Collection):
        return False
    return all(isinstance(text, str) for text in value)


def _check(params: SamplingParams) -> None:
    for name, field in _NUMBERS.items():
        value = getattr(params, name)
        if value is not None and not field.llm_range.holds(value):
            raise ValueError(f"{name} must be {field.llm_range}, not {value!r}")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens {params.min_tokens} is more than max_tokens {params.max_tokens}")
    for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words or ())):
        if not all(texts):  # an empty bad word would ban the space before each word
            raise ValueError(f"{name} must not contain an empty string")
    count = len(params.logprob_token_ids or ())
    if count > MAX_LOGPROB_TOKEN_IDS:
        raise ValueError(f"logprob_token_ids must have at most {MAX_LOGPROB_TOKEN_IDS} ids, not {count}")
    if count and params.logprobs not in (None, count):
        raise ValueError(f"logprobs must be None or the number of logprob_token_ids ({count})")
    if params.stream_interval is not None and not params.stream_interval >= 1:
        raise ValueError(f"stream_interval must be at least 1, not {params.stream_interval!r}")
    if params._wanted() is not None:
        _check_conflicts(params, "structured_outputs")
    if params.stop_strings and not params.detokenize:
        raise ValueError("stop needs detokenize=True: stop strings are found in the text")


def _check_conflicts(params: SamplingParams, binding: str) -> None:
    for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
        if getattr(params, name):
            raise ValueError(f"{name} cannot be combined with {binding}")


def check_for(params: SamplingParams, info: EngineInfo) -> None:
    """Raises ``ValueError`` for token ids outside the vocabulary and more logprobs than the engine allows."""
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > info.max_logprobs:
            raise ValueError(f"{name} must be at most {info.max_logprobs} (max_logprobs)")
    for name in (*_IDS, "logit_bias"):
        for token in getattr(params, name) or ():
            if not isinstance(token, Integral) or not 0 <= int(token) < info.vocab_size:
                raise ValueError(f"{name}: {token} is not a token id (0 to {info.vocab_size - 1})")
