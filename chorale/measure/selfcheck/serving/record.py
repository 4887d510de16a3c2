"""Records log-probabilities and seeded tokens of the running engine, for the checks after it has ended."""

from __future__ import annotations

import asyncio
import json
import math
import random
from typing import Any

from chorale.harmony.vocab import NUM_RANKS
from chorale.measure.selfcheck.check import Failed, Found
from chorale.measure.selfcheck.recorded import KNOWN_ANSWERS, Draw, Position, Sequence
from chorale.measure.selfcheck.serving.server import Server

_TOP = 4  # alternative tokens recorded at each position
_LONG = (8192, 32_768)  # tokens of long prompts, sent if the engine's limits allow them
_TEMPERATURES = (0.5, 1.0, 2.0)
_DRAWN_TOP = 20  # alternative tokens recorded for each sampled token


async def check_record(server: Server) -> Found:
    """Records the scores of fixed texts and greedy continuations of random ones, alone and in batches."""
    plan, recording = server.plan, server.plan.recording
    english: list[int] = json.loads(KNOWN_ANSWERS.read_text("ascii"))["texts"][-1]
    sequences = [
        await _scored(server, "English", english, 0),
        await _scored(server, "one row alone", _random(1, 150), 24),
    ]
    own = [position.logprobs[0] for position in sequences[0].positions]
    perplexity = math.exp(-sum(own) / len(own))
    async with asyncio.TaskGroup() as group:  # rows of different lengths share steps
        tasks = [
            group.create_task(_scored(server, f"row {row} of several", _random(100 + row, 18 + 5 * row), 16))
            for row in range(4 if plan.few else 16)
        ]
        draws = [
            group.create_task(_drawn(server, temperature, seed, top_k))
            for temperature in _TEMPERATURES
            for seed, top_k in ((11, 0), (12, _DRAWN_TOP), (2**40 + 13, _DRAWN_TOP))
        ]
    sequences += [task.result() for task in tasks]
    if not plan.is_slow:
        repeated = (english * 20)[: min(700 if plan.quick else 3500, server.max_model_len - 8)]
        sequences.append(await _scored(server, "English, repeated", repeated, 8))
    for length in () if plan.few else _LONG if plan.has_accelerator else _LONG[:1]:
        if length <= server.max_model_len:
            tokens = _random(length, length - 16)
            sequences.append(await _scored(server, f"{length} tokens", tokens, 16, scores_prompt=False))
    recording.sequences, recording.draws = sequences, [draw.result() for draw in draws]
    count, drawn = (
        sum(len(each.positions) for each in some) for some in (recording.sequences, recording.draws)
    )
    detail = (
        f"{count} positions of {len(sequences)} sequences and {drawn} drawn tokens; perplexity of English"
        f" {perplexity:,.0f} (random weights: about 200,000)"
    )
    return Found(detail, {"perplexity": perplexity, "positions": count, "drawn": drawn})


def _random(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(NUM_RANKS) for _ in range(length)]


async def _scored(
    server: Server, name: str, tokens: list[int], more: int, *, scores_prompt: bool = True
) -> Sequence:
    """Records the scores of ``tokens`` from the second on, then of ``more`` tokens sampled greedily."""
    asked = {"prompt_logprobs": _TOP} if scores_prompt else {}
    positions = await _positions(server, tokens, more, _TOP, temperature=0, **asked)
    generated = [each.token_ids[0] for each in positions if each.index >= len(tokens)]
    return Sequence(name, [*tokens, *generated], len(tokens), positions)


async def _drawn(server: Server, temperature: float, seed: int, top_k: int) -> Draw:
    fields = {"temperature": temperature, "seed": seed, "top_k": top_k or -1}
    fields |= {"top_p": 1, "min_p": 0, "repetition_penalty": 1}
    positions = await _positions(server, _random(seed, 30), 48, _DRAWN_TOP, **fields)
    return Draw(temperature, seed, top_k, positions)


async def _positions(
    server: Server, prompt: list[int], count: int, top: int, **fields: Any
) -> list[Position]:
    """Returns the positions of the prompt, if they are requested, then those of ``count`` sampled tokens."""
    asked = {"prompt": prompt, "max_tokens": max(count, 1), "ignore_eos": True, "logprobs": top, **fields}
    with_ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = await server.choice("completions", **asked, **with_ids)
    found = []
    for index, entry in enumerate(choice.get("prompt_logprobs") or []):
        if entry is not None:
            named = {int(token): each["logprob"] for token, each in entry.items()}
            found.append(_position(index, prompt[index], named))
    sampled, given = choice["token_ids"][:count], choice["logprobs"]
    if len(sampled) != count:
        lost = f"{len(sampled)} tokens instead of {count}"
        raise Failed(f"a prompt of {len(prompt)} tokens was continued by {lost}, with ignore_eos")
    for number, token in enumerate(sampled):
        named = {int(name.removeprefix("token_id:")): v for name, v in given["top_logprobs"][number].items()}
        named[token] = given["token_logprobs"][number]
        found.append(_position(len(prompt) + number, token, named))
    return found


def _position(index: int, token: int, logprobs: dict[int, float]) -> Position:
    """Returns a position. ``token`` and its log-probability come first."""
    ids = [token, *(other for other in logprobs if other != token)]
    values = [logprobs[each] for each in ids]
    if not all(math.isfinite(value) and value <= 1e-3 for value in values):
        raise Failed(f"invalid log-probabilities at position {index}: {values}")
    return Position(index, ids, values)
