"""Worker: one rank. Owns the model, the KV pool, the buffers and the sampler, and runs whole steps.

``run`` enqueues a step and returns a function that waits for its results. Steps in which every row computes
one token run in static memory, as a graph where possible (``decode_graphs.py``). ``run`` does not wait for
the device, so with a GPU the worker can be one step ahead. Only rows with a grammar make it wait for the
previous step (``grammar.py``), after the forward pass is enqueued.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chorale.engine.types import StepPlan, StepResult
from chorale.kernels.adapters import NONE
from chorale.kernels.ops import ForwardBatch
from chorale.model.gpt_oss import AuxStates
from chorale.runtime.adapters import captures
from chorale.runtime.drafts.drafting import Drafting
from chorale.runtime.offload import PageTransfers
from chorale.runtime.sampling.batch import SamplingBatch
from chorale.runtime.sampling.grammar import Fetch, GrammarRows
from chorale.runtime.sizing.graph_sizes import MIXED_ROWS
from chorale.runtime.sizing.memory import LOGIT_ROWS, PROMPT_ROWS
from chorale.runtime.steps.batch import DraftTensors, StepBatch, sample_layout, single_samples
from chorale.runtime.steps.buffers import query_starts
from chorale.runtime.steps.decode_graphs import DecodeGraphRunner
from chorale.runtime.steps.graphs import StepParts
from chorale.runtime.steps.mixed_graphs import MixedGraphRunner, dummy_plan
from chorale.runtime.steps.results import PendingLogprobs, empty_result, make_result

LogitsOf = Callable[[slice], torch.Tensor]  # slice of the samples -> their logits, float32


class Worker:
    """The only writer of its device's memory."""

    def __init__(
        self,
        parts: StepParts,
        grammar: GrammarRows,
        decode_graphs: DecodeGraphRunner | None = None,
        mixed_graphs: MixedGraphRunner | None = None,
        drafting: Drafting | None = None,
        transfers: PageTransfers | None = None,
        prompt_rows: int = PROMPT_ROWS,
    ) -> None:
        """``decode_graphs`` and ``mixed_graphs`` run the steps that they support; None: every step is
        launched. ``drafting``: required if plans have drafts; ``transfers``: if they have transfers.
        ``prompt_rows``: positions of a prompt whose log-probabilities are computed at once."""
        self.device, self._model, self._kv = parts.device, parts.model, parts.kv
        self._buffers, self._sampler, self._adapters = parts.buffers, parts.sampler, parts.adapters
        self._grammar = grammar
        self._decode_graphs, self._mixed_graphs = decode_graphs, mixed_graphs
        self._drafting = drafting
        self._transfers = transfers
        self._prompt_rows = prompt_rows

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Enqueue one step. Returns a function that waits for its result."""
        if self._transfers is None:
            return self._run(plan)
        self._transfers.before(plan)
        fetch = self._run(plan) if len(plan.rows) else functools.partial(empty_result, plan)
        return self._transfers.reporting(plan, fetch)

    def _run(self, plan: StepPlan) -> Callable[[], StepResult]:
        for start in plan.starts:
            self._grammar.start(start)
        self._buffers.start_rows(plan)
        drafting = self._drafting
        if drafting is not None:
            drafting.start(plan.starts)
        reach = NONE if self._adapters is None else self._adapters.start_rows(plan)
        graphs = self._decode_graphs if captures(self._adapters, reach) else None
        if graphs is not None and graphs.takes(plan):
            return self._with_experts(plan, self._run_graph(graphs, plan, reach))
        if reach != NONE:  # steps with drafts and adapters are not captured
            return self._with_experts(plan, self._run_launched(plan, reach))
        if drafting is not None and drafting.graphs is not None and drafting.graphs.takes(plan):
            fetch = drafting.graphs.run(plan)
            width, layout = drafting.graphs.last_width, sample_layout(plan, query_starts(plan))
            places = layout.entries * width + layout.offsets
            return self._with_experts(
                plan, lambda: make_result(plan, layout, [], [], [fetch()[places]]), width
            )
        return self._with_experts(plan, self._run_launched(plan))

    def _with_experts(
        self, plan: StepPlan, fetch: Callable[[], StepResult], width: int | None = None
    ) -> Callable[[], StepResult]:
        """Add the routed experts of an enqueued step to its result. ``width``: tokens that the step computed
        for each row; None: ``num_new``."""
        routed = self._model.routed
        if routed is None:
            return fetch
        count = plan.num_tokens if width is None else len(plan.rows) * width
        wait = self.device.download([routed[:count].clone()])  # the next step overwrites them

        def finish() -> StepResult:
            result, found = fetch(), wait()[0].astype(np.uint8, copy=False)
            if width is not None:
                found = found[(np.arange(width) < plan.num_new[:, None]).ravel()]
            return replace(result, experts=found)

        return finish

    def _run_launched(self, plan: StepPlan, reach: int = NONE) -> Callable[[], StepResult]:
        """Run a step kernel by kernel, except its forward pass if that is captured."""
        adapters = self._adapters.batch(plan) if self._adapters is not None and reach != NONE else None
        batch, hidden, aux = self._hidden(plan, adapters, reach)
        step = self._buffers.sampling_step(plan)
        if self._drafting is not None:
            step = self._drafting.settled(plan, step, batch)
        prompt = self._score_prompts(hidden, step, adapters)
        layout = step.layout
        allowed = self._grammar.allowed(step.sampling.rows, layout.drafts)
        tokens, wanted = self._choose(
            lambda some: self._model.logits(hidden, step.logits_index[some], adapters),
            step.sampling.with_grammars(allowed),
            layout.entries,
            step.drafts,
        )
        drafts = None
        if batch is not None and aux is not None and self._drafting is not None:
            drafts = self._drafting.run_head(plan, step, batch, aux.states, tokens)
        fetch = self._start_download(tokens, wanted + prompt, drafts)
        self._grammar.sampled(step.sampling.rows, fetch, layout.drafts)
        return lambda: make_result(plan, layout, wanted, prompt, fetch(), has_drafts=drafts is not None)

    def _hidden(
        self, plan: StepPlan, adapters: Any, reach: int
    ) -> tuple[ForwardBatch | None, torch.Tensor, AuxStates | None]:
        """Return hidden states [T, H]; if there is a draft head, also the batch and the states that it
        reads."""
        mixed, head = self._mixed_graphs, None
        padded = mixed.padded(plan) if mixed is not None and captures(self._adapters, reach) else None
        if self._drafting is not None and plan.num_made >= 0:
            head = self._drafting.head
        if mixed is None or padded is None:
            batch = replace(self._buffers.fill(plan), adapters=adapters)
            aux = None if head is None else head.aux_states(plan.num_tokens)
            return batch, self._model.hidden(batch, self._kv, aux), aux
        hidden = mixed.hidden(padded, reach)
        if head is None:
            return None, hidden, None
        assert mixed.aux is not None
        return self._buffers.fill(plan), hidden, mixed.aux.first(plan.num_tokens)

    @torch.inference_mode()
    def capture_decode(self, rows: int, longest: int, filtered: bool = False, reach: int = NONE) -> None:
        """Capture the graph of a decode step before it is needed. ``reach``: what adapters may change."""
        if self._decode_graphs is not None and captures(self._adapters, reach):
            self._decode_graphs.graph(rows, longest, filtered, reach)

    @torch.inference_mode()
    def capture_verify(self, rows: int, width: int, longest: int, filtered: bool = False) -> None:
        """Capture the graph of a step with drafts before it is needed."""
        if self._drafting is not None and self._drafting.graphs is not None:
            self._drafting.graphs.graph(rows, width, longest, filtered)

    @torch.inference_mode()
    def try_size(self, num_tokens: int, rows: int = MIXED_ROWS[0], reach: int = NONE) -> None:
        """Run a forward pass of ``num_tokens`` dummy tokens, captured if possible, to compile its kernels."""
        if self._mixed_graphs is None or not captures(self._adapters, reach):
            return
        if num_tokens in self._mixed_graphs.sizes:
            self._mixed_graphs.graph(num_tokens, rows, reach)
        else:
            plan = dummy_plan(num_tokens, self._buffers.spare_row)
            batch = self._buffers.fill(plan)
            if self._adapters is not None:
                tokens = torch.full_like(batch.token_ids, self._buffers.spare_row)
                batch = replace(batch, adapters=self._adapters.of_rows(tokens, reach))
            self._model.hidden(batch, self._kv)

    def _run_graph(self, graphs: DecodeGraphRunner, plan: StepPlan, reach: int) -> Callable[[], StepResult]:
        """Run a decode step in static memory. Rows that need it are sampled again from its logits."""
        launch = graphs.launch(plan, reach)
        layout = single_samples(np.arange(len(plan.rows)))
        again = np.flatnonzero(self._buffers.rows.needs_resampling[plan.rows])
        if not len(again):
            collect = graphs.collect(launch)
            return lambda: make_result(plan, layout, [], [], [collect()])
        positions = plan.num_computed[again].astype(np.int64) + 1
        batch = self._buffers.sampling_of(plan.rows[again], positions)
        is_all = len(again) == len(plan.rows)
        index = None if is_all else self.device.upload(again.astype(np.int32)).long()
        batch = batch.with_grammars(self._grammar.allowed(batch.rows))
        tokens, wanted = self._choose(lambda some: graphs.logits(launch, some, index), batch, again)
        if index is not None:
            tokens = graphs.tokens[: len(plan.rows)].clone().index_copy_(0, index, tokens)
        fetch = self._start_download(tokens, wanted)
        self._grammar.sampled(plan.rows, fetch)
        return lambda: make_result(plan, layout, wanted, [], fetch())

    def _score_prompts(self, hidden: torch.Tensor, step: StepBatch, adapters: Any) -> list[PendingLogprobs]:
        """Enqueue the prompts' log-probabilities.

        A few positions at a time go through the output head: all at once would take gigabytes.
        """
        prompt, rows = [], self._prompt_rows
        for request in step.prompt:
            indices = torch.arange(request.first, request.first + len(request.targets), device=hidden.device)
            for index, targets in zip(indices.split(rows), request.targets.split(rows), strict=True):
                logits = self._model.logits(hidden, index, adapters)
                tensors = self._sampler.logprobs(logits, targets, request.num_top)
                prompt.append(PendingLogprobs(request.entry, tensors))
        return prompt

    def _choose(
        self,
        logits_of: LogitsOf,
        batch: SamplingBatch,
        entries: npt.NDArray[np.int64],
        drafts: DraftTensors | None = None,
    ) -> tuple[torch.Tensor, list[PendingLogprobs]]:
        """Sample tokens [N] of a batch, and enqueue their log-probabilities where requested. Store the tokens
        on the device, where the next plan refers to them by -1.

        A token that is not kept is returned as REJECTED. Rows without a valid token store 0, which is never
        read.
        """
        if drafts is not None:  # after the last draft token it writes NO_DRAFT, which nothing reads
            for sample, processors in batch.processors.items():
                processors.foresee(drafts.drafts[sample : sample + 1], int(batch.positions[sample]))
        tokens, wanted = self._sample(logits_of, batch, entries)
        known, rows, kept = tokens.clamp(min=0), batch.row_index, None
        if drafts is not None:
            kept = drafts.kept(tokens)
            rows = torch.where(drafts.last_kept(tokens, kept), rows, self._buffers.spare_row)
            tokens = drafts.without_rejected(tokens, kept)
        self._buffers.last_token.index_copy_(0, rows, known)
        for sample, processors in batch.processors.items():
            own = slice(sample, sample + 1)
            processors.record(known[own], int(batch.positions[sample]), None if kept is None else kept[own])
        return tokens, wanted

    def _sample(
        self, logits_of: LogitsOf, batch: SamplingBatch, entries: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, list[PendingLogprobs]]:
        """Sample a few rows at a time: the logits of a thousand rows would take nearly a gigabyte."""
        if len(batch) <= LOGIT_ROWS:
            return self._sample_some(logits_of(slice(None)), batch, entries)
        tokens, wanted = [], []
        for first in range(0, len(batch), LOGIT_ROWS):
            some = slice(first, min(first + LOGIT_ROWS, len(batch)))
            samples = np.arange(some.start, some.stop)
            own = batch.at(samples, torch.arange(some.start, some.stop, device=batch.row_index.device))
            chosen, pending = self._sample_some(logits_of(some), own, entries[some])
            tokens.append(chosen)
            wanted += pending
        return torch.cat(tokens), wanted

    def _sample_some(
        self, logits: torch.Tensor, batch: SamplingBatch, entries: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, list[PendingLogprobs]]:
        tokens = self._sampler.sample(logits, batch)
        wanted = []
        for sample in np.flatnonzero(batch.state.num_logprobs[batch.rows] >= 0).tolist():
            named = self._buffers.rows.named.get(int(batch.rows[sample]))
            tensors = self._sampler.logprobs_at(sample, logits, tokens, batch, named)
            wanted.append(PendingLogprobs(int(entries[sample]), tensors))
        return tokens, wanted

    def _start_download(
        self, tokens: torch.Tensor, wanted: list[PendingLogprobs], drafts: torch.Tensor | None = None
    ) -> Fetch:
        tensors = [tokens]
        for part in wanted:
            tensors.extend(part.tensors)
        if drafts is not None:
            tensors.append(drafts)
        # Cached, because the grammar may read the result first.
        return functools.cache(self.device.download(tensors))
