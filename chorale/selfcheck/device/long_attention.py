"""Attention over long contexts whose answer is known: a needle whose weight follows from its score.

Every key but the needles is zero, and each query points at one needle, so its scores are s there and 0
elsewhere. Its result is then (e^s v_needle + the sum of the other values it sees) / (e^s + the number of the
others + e^sink), whatever the length: no other implementation is needed. Values and keys are numbers that
bfloat16 and e4m3 hold exactly. Needles are at the first position, at the edges of blocks and of the window,
and at the last position; those that the window hides must not be seen.
"""

from __future__ import annotations

import math

import torch

from chorale.kernels.ops import AttentionShape
from chorale.model.config import FULL, WINDOW
from chorale.selfcheck.check import Failed, Found
from chorale.selfcheck.device.errors import ErrorTable, limit_of
from chorale.selfcheck.device.machine import Machine
from chorale.selfcheck.device.steps import PagedSequence, Step

LENGTHS = (1024, 8192, 65536, 131072)
_KEY = 16.0  # of a needle, in one dimension
_LAST = 48  # tokens of the prompt chunk at the end of the context


def check_long_attention(machine: Machine) -> Found:
    """Raises ``Failed`` naming the length, the step and the kind of layer."""
    lengths = [length for length in LENGTHS if length <= machine.max_model_len]
    if machine.quick:
        lengths = lengths[:2]
    table = ErrorTable()
    with torch.inference_mode():
        for length in lengths or [machine.max_model_len]:
            _check_length(machine, length, table)
    table.check()
    shown = ", ".join(f"{length:,}" for length in lengths or [machine.max_model_len])
    left = [f"{each:,}" for each in LENGTHS if each > machine.max_model_len]
    more = f" ({', '.join(left)}: above --max-model-len)" if left and not machine.quick else ""
    worst = max(each.error for each in table.worst.values())
    return Found(f"needles found at {shown} tokens{more}; worst error {worst:.2g}", table.facts)


def _check_length(machine: Machine, length: int, table: ErrorTable) -> None:
    config = machine.model
    shape = AttentionShape(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.sliding_window
    )
    sequence = PagedSequence(length, machine.block_size, machine.device, seed=length)
    kv = sequence.pool(shape.num_kv_heads, shape.head_dim, machine.kv_dtype)
    places = _places(length, machine.block_size, config.sliding_window, shape.head_dim)
    generator = torch.Generator().manual_seed(length)
    values = torch.randint(-8, 9, (length, shape.num_kv_heads, shape.head_dim), generator=generator) / 4.0
    values = values.to(machine.device)
    keys = torch.zeros_like(values)
    for number, place in enumerate(places):
        keys[place, :, number] = _KEY
    sinks = torch.linspace(-2.0, math.log(length), shape.num_heads, device=machine.device)
    decodes = sequence.decodes([length - 1] * len(places))
    chunk = sequence.prompt(min(_LAST, length))
    for group, window in ((FULL, None), (WINDOW, config.sliding_window)):
        sequence.write(kv, group, keys, values)
        for step in (decodes, chunk):
            aims = torch.arange(len(step.tokens), device=machine.device) % len(places)
            q = _queries(step, aims, shape, window or length).to(machine.query_dtype)
            plan = machine.ops.plan_attention(step.meta, shape, machine.block_size)
            found = machine.ops.attention(q, kv, sinks, plan, group)
            exact = _known(step, q, aims, places, values, sinks, window, shape)
            kind = "full" if window is None else "window"
            where = f"{length} tokens, {kind} layers, {step.name}"
            table.add("attention", where, found, exact, limit_of(machine.dtype))


def _places(length: int, block: int, window: int, most: int) -> list[int]:
    """Returns the positions of the needles. The last query sees ``window`` tokens, its own included."""
    wanted = [
        *(0, length // 2, block - 1, block, length - 1, length - window, length - window - 1),
        *(length // 3 // block * block, length - 2 * block, length * 3 // 4),
    ]
    return [place for place in dict.fromkeys(wanted) if 0 <= place < length][:most]


def _queries(step: Step, aims: torch.Tensor, shape: AttentionShape, seen: int) -> torch.Tensor:
    """[T, Nq, D]: each query's score of its needle is such that it gets about half of the weight."""
    score = math.log(max(seen, 2))
    q = torch.zeros(len(aims), shape.num_heads, shape.head_dim, device=aims.device)
    q[torch.arange(len(aims), device=aims.device), :, aims] = score * math.sqrt(shape.head_dim) / _KEY
    return q


def _known(
    step: Step,
    q: torch.Tensor,
    aims: torch.Tensor,
    places: list[int],
    values: torch.Tensor,
    sinks: torch.Tensor,
    window: int | None,
    shape: AttentionShape,
) -> torch.Tensor:
    """[T, Nq * D] in float64, from the formula."""
    each = shape.num_heads // shape.num_kv_heads
    sums = torch.cat((torch.zeros_like(values[:1]).double(), values.double().cumsum(0)))
    spots = torch.tensor(places, device=q.device)[aims]
    ends = step.tokens + 1
    first = (ends - window).clamp(min=0) if window is not None else torch.zeros_like(ends)
    is_seen = ((spots >= first) & (spots < ends)).double().view(-1, 1, 1)
    others = (ends - first).double().view(-1, 1, 1) - is_seen
    rows = torch.arange(len(aims), device=q.device)
    scores = q[rows, :, aims].double() * _KEY / math.sqrt(shape.head_dim)  # [T, Nq]
    needle = scores.exp().unsqueeze(-1) * is_seen
    own = values[spots].double()
    rest = sums[ends] - sums[first] - own * is_seen
    own, rest = (part.repeat_interleave(each, 1) for part in (own, rest))  # [T, Nq, D]
    mass = needle + others + sinks.double().exp().view(1, -1, 1)
    found = (needle * own + rest) / mass
    if not bool(found.isfinite().all()):
        raise Failed("the known answer is not finite: an error of the self-check")
    return found.flatten(1)
