"""TokenUsage: the counts in the ``usage`` of a chat, a completion or a response."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one answer, or a sum over several.

    ``cached`` is part of ``input``, ``reasoning`` of ``output``.
    """

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Answer)


def usage_of(answer: object) -> TokenUsage:
    """Returns the usage of an answer, given as bytes or as decoded JSON; zeros if it has none."""
    try:
        found = (
            _decoder.decode(answer) if isinstance(answer, bytes) else msgspec.convert(answer, _Answer)
        ).usage
    except (ValueError, msgspec.MsgspecError):
        return TokenUsage()
    if found is None:
        return TokenUsage()
    before = found.prompt_tokens_details or found.input_tokens_details or _Details()
    after = found.completion_tokens_details or found.output_tokens_details or _Details()
    return TokenUsage(
        input=found.prompt_tokens or found.input_tokens or 0,
        cached=before.cached_tokens or 0,
        output=found.completion_tokens or found.output_tokens or 0,
        reasoning=after.reasoning_tokens or 0,
    )
