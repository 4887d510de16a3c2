"""Log-probabilities of the running engine: recorded for the comparison, and what they say of the weights."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

from chorale.harmony.vocab import load_vocabulary
from chorale.selfcheck.check import Failed, Found, Skipped
from chorale.selfcheck.recorded import Position, Sequence
from chorale.selfcheck.serving.context import Context
from chorale.selfcheck.serving.server import Server
from chorale.selfcheck.serving.texts import CODE, ENGLISH, FILLER, NEEDLE, QUESTION

_WORDS = 199_000  # ordinary tokens
_TOP = 4  # alternatives at each position
_LONG = (8192, 131072)  # tokens; those that the engine's limits allow
NEEDLE_LENGTHS = (1024, 8192, 65536, 131072)


async def check_record(server: Server, context: Context) -> Found:
    """Scores fixed texts and lets the engine go on with others, alone and together, greedily."""
    vocab = load_vocabulary()
    english = await _scored(server, "English", vocab.encode(ENGLISH), 0)
    own = [position.logprobs[0] for position in english.positions]
    context.perplexity = math.exp(-sum(own) / len(own))
    sequences = [english, await _scored(server, "one row alone", _random(1, 150), 24)]
    few = context.is_slow or context.quick
    async with asyncio.TaskGroup() as group:  # rows of unequal length, in the same steps
        jobs = [
            group.create_task(_scored(server, f"row {row} of several", _random(100 + row, 18 + 5 * row), 16))
            for row in range(4 if few else 16)
        ]
    sequences += [job.result() for job in jobs]
    if not context.is_slow:
        repeated = (vocab.encode(ENGLISH) * 20)[: 700 if context.quick else 3500]
        sequences.append(await _fitting(server, "English, repeated", repeated, 8))
    for length in () if few else _LONG if context.has_accelerator else _LONG[:1]:
        if length <= min(server.max_model_len, server.kv_tokens):
            tokens = _random(length, length - 16)
            name = f"{length} tokens"
            sequences.append(await _scored(server, name, tokens, 16, prompt_logprobs=False))
    context.sequences = sequences
    count = sum(len(each.positions) for each in sequences)
    kind = "trained" if context.is_trained else "random, or of a small model"
    detail = (
        f"{count} positions of {len(sequences)} sequences; perplexity of English {context.perplexity:,.0f}: "
        f"weights are {kind}"
    )
    return Found(detail, {"perplexity": context.perplexity, "positions": count})


def _random(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(_WORDS) for _ in range(length)]


async def _fitting(server: Server, name: str, tokens: list[int], more: int) -> Sequence:
    return await _scored(server, name, tokens[: server.max_model_len - more], more)


async def _scored(
    server: Server, name: str, tokens: list[int], more: int, *, prompt_logprobs: bool = True
) -> Sequence:
    """Scores ``tokens`` from the second on, and ``more`` that the engine chooses greedily."""
    fields: dict[str, Any] = {"prompt_logprobs": _TOP} if prompt_logprobs else {}
    choice = await server.complete(
        prompt=tokens,
        max_tokens=max(more, 1),
        temperature=0,
        ignore_eos=True,
        logprobs=_TOP,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        **fields,
    )
    positions = []
    for index, entry in enumerate(choice.get("prompt_logprobs") or []):
        if entry is not None:
            positions.append(
                _position(index, tokens[index], {int(k): v["logprob"] for k, v in entry.items()})
            )
    generated = choice["token_ids"][:more]
    given = choice["logprobs"]
    for place, token in enumerate(generated):
        named = {int(name.removeprefix("token_id:")): v for name, v in given["top_logprobs"][place].items()}
        named[token] = given["token_logprobs"][place]
        positions.append(_position(len(tokens) + place, token, named))
    if len(generated) != more:
        raise Failed(f"{name}: {len(generated)} tokens instead of {more} with ignore_eos")
    return Sequence(name, [*tokens, *generated], len(tokens), positions)


def _position(index: int, token: int, logprobs: dict[int, float]) -> Position:
    """The token's own comes first."""
    others = [other for other in logprobs if other != token]
    values = [logprobs[token], *(logprobs[other] for other in others)]
    if not all(math.isfinite(value) and value <= 1e-3 for value in values):
        raise Failed(f"log-probabilities at position {index} are not: {values}")
    return Position(index, [token, *others], values)


async def check_needle(server: Server, context: Context) -> Found:
    """Hides a number in long prompts and asks for it, where the weights can answer."""
    if context.perplexity is None:
        raise Skipped("it needs the check record, which tells trained weights from random ones")
    if not context.is_trained or context.is_small:
        raise Skipped(
            f"these weights do not answer questions (perplexity of English {context.perplexity:,.0f}); the "
            "checks attention and logprobs cover long contexts"
        )
    vocab = load_vocabulary()
    filler, lengths = vocab.encode(FILLER), []
    for length in NEEDLE_LENGTHS[: 2 if context.quick or not context.has_accelerator else None]:
        room = min(length, server.max_model_len, server.kv_tokens) - 1200  # for the answer and the question
        if length > min(server.max_model_len, server.kv_tokens) or room <= 0:
            continue
        for depth in (0.1, 0.5, 0.9):
            before, after = int(room * depth / len(filler)), int(room * (1 - depth) / len(filler))
            text = FILLER * before + NEEDLE + FILLER * after
            messages = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
            choice = await server.chat(
                messages=messages, temperature=0, max_tokens=1000, reasoning_effort="low"
            )
            answer = choice["message"]["content"] or ""
            if CODE not in answer:
                raise Failed(f"at {length:,} tokens, depth {depth:.0%}: {answer[:80]!r} instead of {CODE}")
        lengths.append(length)
    if not lengths:
        raise Skipped(f"--max-model-len {server.max_model_len} leaves no room for one")
    return Found(f"found at {', '.join(f'{each:,}' for each in lengths)} tokens, at 3 depths each")
