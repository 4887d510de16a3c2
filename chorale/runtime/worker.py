"""Worker: one rank. It owns the model, the KV pool, the buffers and the sampler, and runs whole steps.

``run`` enqueues a step and returns a function that waits for its results; nothing in between waits for the
device, so a worker of a GPU can be a step ahead of the host. Only rows with a grammar make it wait, for the
step before (``grammar.py``), once the forward pass is enqueued.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from chorale.engine.types import StepPlan, StepResult, TokenLogprobs
from chorale.model.gpt_oss import GptOss
from chorale.runtime.batch import SamplingBatch, StepBatch
from chorale.runtime.buffers import Buffers
from chorale.runtime.device import Arrays, Device
from chorale.runtime.grammar import GrammarRows
from chorale.runtime.logprobs import LogprobTensors, gather_in_parts, to_records
from chorale.runtime.sampler import FORBIDDEN, NO_TOKEN, Sampler

_PROMPT_ROWS_AT_ONCE = 64  # rows of logits in one log-probability pass
BAD_LOGITS = "the model gave no finite logits for this sequence"
ALL_FORBIDDEN = "every token was forbidden by the request's own constraints (grammar, allowed ids, bad words)"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Log-probabilities that were enqueued: for which entry, how many alternatives at each position."""

    entry: int
    num_top: int
    tensors: LogprobTensors


class Worker:
    """The only writer of everything on its device."""

    def __init__(
        self,
        device: Device,
        model: GptOss,
        kv: list[torch.Tensor],
        buffers: Buffers,
        sampler: Sampler,
        grammar: GrammarRows,
    ) -> None:
        self._device, self._model, self._kv = device, model, kv
        self._buffers, self._sampler, self._grammar = buffers, sampler, grammar

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Enqueue one step; the returned function waits for it."""
        for start in plan.starts:
            self._grammar.start(start)
        step = self._buffers.fill(plan)
        sampled, prompt = self._forward(step)
        masks = self._grammar.masks(step.sampling.rows)
        tokens = self._sampler.sample(sampled, step.sampling, masks)
        self._remember(tokens, step.sampling)
        wanted = self._sampled_logprobs(sampled, tokens, step)
        tensors = [tokens]
        for part in wanted + prompt:
            tensors.extend(part.tensors.tensors())
        fetch = functools.cache(self._device.download(tensors))  # the grammar may read it before the caller
        self._grammar.sampled(step.sampling.rows, fetch)
        return lambda: _result(plan, step, wanted, prompt, fetch())

    def _forward(self, step: StepBatch) -> tuple[torch.Tensor, list[Wanted]]:
        """Logits of the sampled entries [N, V], and the prompts' log-probabilities.

        Prompt positions go through the head a few at a time: all of them at once would be gigabytes.
        """
        hidden = self._model.hidden(step.forward, self._kv)
        prompt = []
        for wish in step.prompt:
            places = torch.arange(wish.first, wish.first + len(wish.targets), device=hidden.device)
            for index, targets in zip(
                places.split(_PROMPT_ROWS_AT_ONCE), wish.targets.split(_PROMPT_ROWS_AT_ONCE), strict=True
            ):
                logits = self._model.logits(hidden, index)
                tensors = gather_in_parts(logits, targets, wish.num_top, self._device.sample_rows)
                prompt.append(Wanted(wish.entry, wish.num_top, tensors))
        return self._model.logits(hidden, step.forward.logits_index), prompt

    def _remember(self, tokens: torch.Tensor, batch: SamplingBatch) -> None:
        """The next plan may name these tokens with -1. A bad row's token is never used, but must be one."""
        known = tokens.clamp(min=0)
        self._buffers.last_token.index_copy_(0, batch.row_index, known)
        for place, edits in batch.edits.items():
            edits.record(known[place : place + 1], int(batch.positions[place]))

    def _sampled_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, step: StepBatch) -> list[Wanted]:
        wanted = []
        for place in np.flatnonzero(step.sampling.num_logprobs >= 0).tolist():
            num_top = int(step.sampling.num_logprobs[place])
            row = slice(place, place + 1)
            tensors = gather_in_parts(logits[row], tokens[row].clamp(min=0), num_top, 1)
            wanted.append(Wanted(int(step.entries[place]), num_top, tensors))
        return wanted


def _result(
    plan: StepPlan, step: StepBatch, wanted: list[Wanted], prompt: list[Wanted], arrays: Arrays
) -> StepResult:
    """Fetched arrays, in the order in which ``run`` listed their tensors, as a StepResult."""
    tokens = arrays[0].astype(np.int32)
    token_ids = np.full((len(plan.rows), 1), NO_TOKEN, np.int32)
    token_ids[step.entries, 0] = tokens
    num_sampled = plan.samples.astype(np.int32)
    bad, forbidden = (step.entries[tokens == why].tolist() for why in (NO_TOKEN, FORBIDDEN))
    num_sampled[bad + forbidden] = 0
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    width = len(LogprobTensors.__dataclass_fields__)
    for number, part in enumerate(wanted + prompt):
        some = arrays[1 + number * width : 1 + (number + 1) * width]
        records = to_records(some, [part.num_top] * len(some[0]))
        found = logprobs if number < len(wanted) else prompt_logprobs
        found.setdefault(part.entry, []).extend(records)
    return StepResult(
        step_id=plan.step_id,
        token_ids=token_ids,
        num_sampled=num_sampled,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        errors=dict.fromkeys(bad, BAD_LOGITS) | dict.fromkeys(forbidden, ALL_FORBIDDEN),
        forbidden=frozenset(forbidden),
    )
