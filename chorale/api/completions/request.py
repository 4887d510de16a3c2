"""CompletionRequest: the body of POST /v1/completions, and how each field is handled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from chorale.api import fields, limits
from chorale.api.fields import Refusal, StreamedFields
from chorale.api.http.offload import beside, is_heavy
from chorale.errors import RequestError, invalid, unsupported
from chorale.harmony.vocab import Vocabulary
from chorale.requests.prompt import at
from chorale.turns.choice.raw_choice import RawOptions
from chorale.turns.request import TurnRequest

HARMLESS: dict[str, str] = fields.HARMLESS | {"add_special_tokens": "the tokenizer adds no special tokens"}

REFUSED: dict[str, Refusal] = fields.REFUSED | {
    "suffix": Refusal("the model does not support fill-in-the-middle"),
    "thinking_token_budget": Refusal("a raw completion has no separate reasoning", neutral=()),
}


class CompletionRequest(StreamedFields):
    prompt: Any = None  # one of four forms, checked by ``split_prompts``
    best_of: Annotated[int, limits.number("best_of")] | None = None
    max_tokens: Annotated[int, limits.number("completions.max_tokens")] = 16
    response_format: dict[str, Any] | None = None
    echo: bool = False
    logprobs: Annotated[int, limits.number("logprobs")] | None = None
    skip_special_tokens: bool = True

    @property
    def raw_options(self) -> RawOptions:
        return {
            "skip_special_tokens": self.skip_special_tokens,
            "discard": self.max_tokens == 0,
            "scores_stop": self.return_token_ids,
        }

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Returns the number of prompt log-probabilities to compute, including those for ``echo``."""
        echoed = self.logprobs if self.echo else None
        wanted = [number for number in (echoed, self.prompt_logprobs) if number is not None]
        return max(wanted, default=None)


Prompt = tuple[list[int], str]  # the token ids; the text as sent, or decoded if ``echo`` needs it, else ""


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """One prompt, ready for the engine, and its text."""

    turn: TurnRequest
    text: str


def parse_completion(data: Mapping[str, Any]) -> CompletionRequest:
    """Validates a body. Raises ``RequestError`` for the first invalid, unknown or unsupported field."""
    completion = fields.parse(CompletionRequest, data, HARMLESS, REFUSED)
    if completion.best_of not in (None, completion.n):
        raise unsupported("best_of", "must equal n")
    if completion.logprob_token_ids and completion.logprobs is None:
        raise invalid("logprob_token_ids", "needs logprobs")
    completion.check_stream()
    return completion


async def encode_prompts(value: Any, vocab: Vocabulary, *, echo: bool) -> list[Prompt]:
    """Encodes a prompt or a list of prompts, as text or ids. Long texts do not block the event loop."""
    return await beside(lambda: _encode_all(value, vocab, echo), heavy=is_heavy(value))


def _encode_all(value: Any, vocab: Vocabulary, echo: bool) -> list[Prompt]:
    """Encodes all prompts. Text may contain special tokens, since this endpoint is for raw harmony."""
    prompts: list[Prompt] = []
    for prompt in split_prompts(value):
        if isinstance(prompt, str):
            with at("prompt"):
                ids = vocab.encode_with_special(prompt, limits.SIZES["prompt_tokens"].max)
            prompts.append((ids, prompt))
        else:
            prompts.append((prompt, vocab.decode(prompt) if echo else ""))
    return prompts


def split_prompts(value: Any) -> list[str | list[int]]:
    """Returns the checked prompts of a request. Raises ``RequestError`` (param ``prompt``)."""
    if value is None:
        raise RequestError("prompt: is required", param="prompt", code="missing_required_parameter")
    prompts: list[Any] = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not prompts or len(prompts) > limits.SIZES["prompts"].max:
        raise invalid("prompt", f"must contain 1 to {limits.SIZES['prompts'].max} prompts")
    for position, prompt in enumerate(prompts):
        path = "prompt" if prompts[0] is value else f"prompt[{position}]"
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and _is_ids(prompt)):
            raise invalid(path, "must be a string or a list of token ids")
        if not prompt:
            raise invalid(path, "must not be empty")
        if isinstance(prompt, list):
            _check_ids(prompt, path)
    return prompts


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and set(map(type, value)) == {int}


def _check_ids(ids: list[int], path: str) -> None:
    if len(ids) > limits.SIZES["prompt_tokens"].max:
        raise RequestError(f"{path}: too many token ids", param=path, code="array_above_max_length")
    limit = limits.LIMITS["token_id"]
    if min(ids) < limit.min or max(ids) > limit.max:
        position = next(i for i, token in enumerate(ids) if not limit.min <= token <= limit.max)
        raise invalid(f"{path}[{position}]", f"must be a token id from {limit.min} to {limit.max}")
