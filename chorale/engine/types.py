"""The messages across the engine's two boundaries.

Towards the client: ``GenerateRequest`` in, ``TokenChunk``s out, combined into one ``StepOutputs`` message per
step. Towards the device: ``StepPlan`` out, ``StepResult`` in, through the ``Executor`` protocol.

This module uses tokens and stop *ids*, never text; it imports numpy and msgspec, never torch. Client-side
types are msgspec structs (they are encoded as msgpack on every step); device-side types are frozen
dataclasses of numpy arrays (small enough to broadcast to ranks).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from chorale.engine.histogram import STEP_TOKENS, Histogram

# Most stop ids that the sampler itself masks before ``min_tokens``; rows with more get a logits processor.
EARLY_STOPS = 8
# Placeholder for draft tokens on the device: DRAFT - j is the row's draft token j.
DRAFT = -2
# Placeholder for a sample after the first one that differs from the draft.
REJECTED = -(2**20)
# Placeholder for a missing draft token. Differs from every token id and every marker of the sampler.
NO_DRAFT = REJECTED

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
ExpertIds = npt.NDArray[np.uint8]  # [tokens, layers, experts per token]

FinishReason = Literal["stop", "length", "abort", "error"]


# --------------------------------------------------------------------------- client side


# ``TokenChunk.error`` if a request's own constraints forbid every token. Not an engine failure.
ALL_FORBIDDEN = "every token was forbidden by the request's own constraints (grammar, allowed ids, bad words)"


class SamplingSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of one request; token ids only (text-level stops live above the engine).

    All values are already validated and defaulted (``generation_config.json``, then the request).
    """

    n: int = 1
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 means all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    min_tokens: int = 0  # no stop id is sampled before this many output tokens
    max_tokens: int | None = None  # None: up to max_model_len
    ignore_eos: bool = False  # the model's own stop ids do not stop; ``stop_token_ids`` still do
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's stop ids
    seed: int | None = None  # None: drawn by the engine. See ``config/seeds.py``.
    logprobs: int | None = None  # top alternatives per sampled token (0: the sampled token only)
    prompt_logprobs: int | None = None  # the same for each prompt token except the first
    routed_experts_start: int | None = None  # first position whose routed experts are returned; None: none
    # Instead of the top alternatives, if ``logprobs`` is set: these ids at each position, in this order.
    logprob_token_ids: tuple[int, ...] = ()
    skip_reading_prefix_cache: bool = False  # compute the whole prompt
    # Grammar of the output, in the grammar service's form; "": no constraint. The last ``grammar_context``
    # prompt tokens are already part of the output, when a turn continues.
    grammar: str = ""
    grammar_context: int = 0

    @property
    def computes_prompt(self) -> bool:
        """Returns whether the prefix cache is not used for the prompt."""
        return self.prompt_logprobs is not None or self.skip_reading_prefix_cache


class Owner(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The API key of a request. Owners take turns; ``weight``: its share, relative to the others."""

    name: str = ""
    weight: float = 1.0


NOBODY = Owner()


class AdapterRef(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A LoRA adapter. ``id`` is unique for its weights, also when one of its name is loaded again."""

    id: int = 0  # 0: the base model
    name: str = ""
    path: str = ""  # its folder, from which the engine reads it whenever necessary


BASE = AdapterRef()


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt, ``sampling.n`` choices. ``request_id`` is unique among the requests in flight."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingSpec = SamplingSpec()
    priority: int = 0  # lower runs first under the "priority" policy
    is_batch: bool = False  # a line of a batch: yields to all other requests, under every policy
    owner: Owner = NOBODY
    arrival_time: float = 0.0  # time.time() at the client
    cache_salt: str = ""  # prefix blocks are shared only between requests of equal salt and adapter
    adapter: AdapterRef = BASE
    # The sender's estimate of cached prompt tokens, for ``EngineStats.prompt_tokens_left`` only.
    num_expected_cached: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token itself, and the ``top`` alternatives (best first) or those
    of ``logprob_token_ids``."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top_ids: list[int]
    top_logprobs: list[float]


class ChunkTimings(msgspec.Struct, frozen=True, array_like=True):
    """time.time() marks of one choice, sent with its first chunk (``last_token`` is 0 there) and its last."""

    arrival: float
    first_scheduled: float
    first_token: float
    last_token: float
    num_preemptions: int
    drafts: bytes = b""  # two bytes for each verified draft: its tokens, and the accepted ones


class TokenChunk(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one choice. The final chunk carries ``finish_reason`` and may have no tokens.

    ``token_ids`` includes the stop token that ended the choice (its id is also ``stop_token_id``), so
    that the harmony parser sees the terminator. ``num_cached_tokens``/``prompt_logprobs`` come with the
    first chunk of a choice. ``gc=False``: a chunk is never part of a cycle, and tracking a thousand of them
    per step would cost a fifth of the engine's host time.
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    timings: ChunkTimings | None = None
    error: str | None = None
    # ``ExpertIds`` as bytes, one entry: for the first chunk of a choice the prompt's from
    # ``routed_experts_start`` on, then one position for each token: the one from which it was sampled.
    routed_experts: list[bytes] | None = None
    weight_version: str = ""  # label of the weights from this token on; "": as before


class EngineStats(msgspec.Struct, array_like=True):
    """A snapshot after a step: gauges, and counters since the engine process started."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens looked up in the prefix cache
    prefix_cache_hits: int = 0  # tokens found there
    num_preemptions: int = 0
    num_steps: int = 0
    last_step_tokens: int = 0
    num_deferred: int = 0  # waiting for a grammar, or for a sibling to compute the prompt
    # Parts of ``prompt_tokens``: those from the cache, and (not counted there) those cached but recomputed
    # because the last token's logits are needed.
    cached_prompt_tokens: int = 0
    recomputed_prompt_tokens: int = 0
    num_corrupted: int = 0  # sequences that ended because their logits were not finite
    # Drafts that steps verified, their tokens, and the accepted ones among these.
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # number of drafts whose first 1, 2, ... tokens were accepted
    prompt_tokens_left: int = 0  # tokens that prefills and waiting sequences must still compute, an estimate
    # The host memory tier: pages, lookups, bytes copied to it and back.
    host_pages_used: int = 0
    host_pages_total: int = 0
    host_cache_queries: int = 0  # tokens looked up there, which the device's prefix cache lacks
    host_cache_hits: int = 0  # tokens found there; not in ``prefix_cache_hits``
    host_prompt_tokens: int = 0  # part of ``cached_prompt_tokens`` that came from host memory
    host_bytes_saved: int = 0
    host_bytes_loaded: int = 0
    host_pages_dropped: int = 0  # evicted without a copy, because too many were evicted at once
    num_host_loads: int = 0
    host_load_seconds: float = 0.0
    # Histograms (``engine.histogram``). ``step_tokens``: the sampled tokens of a step, and the prompt tokens,
    # without cached ones, of the prompts that it has completed. Blocks: seconds; empty if not observed.
    step_tokens: tuple[float, ...] = Histogram.empty(STEP_TOKENS).values
    block_lifetimes: tuple[float, ...] = ()
    block_idle: tuple[float, ...] = ()
    block_gaps: tuple[float, ...] = ()
    kv_event_batches: int = 0  # batches of KV events, dropped ones included
    kv_event_batches_dropped: int = 0
    sleep_state: int = 0  # 1 + the level of a sleeping engine; 0: awake
    # Names of the adapters of requests in the engine, and of those that wait for a slot.
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()


class StepOutputs(msgspec.Struct, array_like=True):
    """One message per step: the new tokens of one client's requests, and the stats."""

    chunks: list[TokenChunk]
    stats: EngineStats


class BlockChanges(msgspec.Struct, frozen=True, array_like=True):
    """Changes of a prefix index: concatenated hashes of each group. A hash is in at most one of its group's
    two lists.
    """

    full_added: bytes
    full_removed: bytes
    window_added: bytes
    window_removed: bytes
    is_cleared: bool = False  # all other blocks were removed before


class PrefixIndexState(msgspec.Struct, frozen=True, array_like=True):
    """Everything another process needs to compute prefix hits. Empty ``secret``: no prefix is cached."""

    secret: bytes
    block_size: int
    window: int  # tokens that a WINDOW layer sees
    blocks: BlockChanges  # the whole index, as additions


# --------------------------------------------------------------------------- device side


class CacheGroup(enum.IntEnum):
    """Which layers a block belongs to. Blocks of both groups come from one pool and have one size."""

    FULL = 0
    WINDOW = 1


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The scheduler's limits. Built once, after the device was measured."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    sliding_window: int = 128  # tokens that a window layer sees, the query's included
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = False  # plan the next step before the result of the last one is read
    eos_token_ids: tuple[int, ...] = (200002, 199999, 200012)
    vocab_size: int = 201088
    seed: int = 0  # seeds of requests without one are derived from it
    prompt_delay: float = 0.0  # seconds that prompts may add to a step of running streams; 0: no bound
    max_prompt_delay: float = 0.0  # the same while many prompts wait; at least prompt_delay
    max_num_active_seqs: int = 0  # rows that may be in use at once; 0: all
    prefill_interval: int = 1  # steps from one step with prompts to the next, while streams run
    long_prefill: int = 0  # prompt tokens of a sequence per step beside others; 0: no bound
    long_prefill_share: bool = False  # the bound is at least an equal share of a step's tokens
    watermark: float = 0.01  # share of the blocks that admissions leave free while anything runs
    batch_delay: float = 0.0  # maximum seconds of a step with batch work; 0: no bound
    long_batch_delay: float = 0.0  # the same after a while without other requests
    # Steps with other rows contain no batch rows: where each row prolongs a step, sharing gains nothing.
    batch_waits: bool = False
    least_chunk: int = 1  # prompt tokens that a step may compute even beyond ``prompt_delay``
    observed_blocks: float = 0.0  # share of the blocks whose lives are measured
    num_host_slots: int = 0  # pages of the host memory tier; 0: no tier
    max_saved_pages: int = 0  # maximum pages copied to the host before one step
    min_host_hit: int = 1  # tokens by which a hit with host memory must exceed the device's
    page_bytes: int = 0  # sum over all ranks, for statistics only
    routed_experts: tuple[int, int] | None = None  # layers and experts per token of ``StepResult.experts``
    max_loras: int = 0  # adapters that may run at once; 0: none
    # (minimum decoding rows of a step, maximum draft tokens of each row), ascending; (): no bound
    draft_tokens: tuple[tuple[int, int], ...] = ()

    def drafts_at(self, rows: int) -> int:
        """Return how many draft tokens each row may have in a step with ``rows`` decoding rows."""
        counts = (count for least, count in reversed(self.draft_tokens) if max(1, rows) >= least)
        return next(counts, self.max_model_len)


@dataclass(frozen=True, slots=True)
class RowStart:
    """Assigns a row of the device buffers to a sequence: on admission, and again after a preemption.

    ``token_ids``: prompt and earlier output, for penalties, bad words and min_tokens. The tokens to compute
    are in the plan.
    """

    row: int
    token_ids: IntArray
    num_prompt_tokens: int
    sampling: SamplingSpec
    seed: int  # resolved for this choice
    eos_token_ids: tuple[int, ...]  # ids masked while fewer than min_tokens were sampled
    adapter_slot: int = -1  # -1: the base model


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Copies of pages from host memory into blocks that no step uses until the load has finished.

    Before it overwrites ``saved_blocks``, it copies their content to ``saved_slots``.
    """

    load_id: int
    slots: IntArray
    blocks: IntArray
    saved_slots: IntArray
    saved_blocks: IntArray


@dataclass(frozen=True, slots=True)
class Transfers:
    """Copies between blocks and slots of host memory, in the order of the fields."""

    saved_slots: IntArray  # no slot appears twice
    saved_blocks: IntArray  # copied to the host before this step can overwrite them
    loads: tuple[HostLoad, ...] = ()  # start in this order after the previous steps have finished
    finished: tuple[int, ...] = ()  # loads whose blocks this step may use


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, as numbers. Entry ``i`` of the first block of arrays is one row of the batch.

    A prefill chunk, a decode and a decode with a draft differ only in ``num_new``. Block tables live on the
    device and are appended to: ``appends`` lists the new blocks of rows. Decodes come first, those with
    drafts after the others.

    A draft of K tokens follows the row's last token: ``num_new`` is 1 + K, and a token is sampled after each
    of them. The row keeps the samples up to and including the first that differs from the draft. A draft that
    a head made is on the device: its tokens are -2, -3, ... here. Such an entry may be planned before the
    result of the row's last step is known; then ``num_computed`` is an upper bound.

    A plan without rows waits briefly for loads from host memory.
    """

    step_id: int
    starts: tuple[RowStart, ...]
    rows: IntArray  # [R] device row
    num_computed: IntArray  # [R] tokens whose KV is in the cache before this step
    num_new: IntArray  # [R] tokens computed in this step, >= 1
    # [R] sample after the last new token, and after each token that precedes a draft token.
    samples: BoolArray
    token_ids: IntArray  # [sum(num_new)]; -1: the token that this row sampled last, still on the device
    appends: IntArray  # [4 * A]: ``append_columns``
    # Rows that need log-probabilities of the prompt.
    prompt_logprob_rows: frozenset[int] = field(default_factory=frozenset)
    num_drafts: IntArray | None = None  # [R] draft tokens among the new ones; None: no drafts
    # Draft tokens that the head makes after this step; 0: it only reads; -1: it does not run.
    num_made: int = -1
    makes: BoolArray | None = None  # [R] whether the entry gets these drafts; None: no head runs
    # [R] the prompt token after the last new one, -1 if it is sampled; None: no head runs.
    following: IntArray | None = None
    transfers: Transfers | None = None  # the only work of a step without rows

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def append_columns(self) -> IntArray:
        """Returns [4, A]: CacheGroup, row, logical block (position // block_size) and block id in the
        pool."""
        return self.appends.reshape(4, -1)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens sampled by a step, aligned with ``StepPlan.rows``."""

    step_id: int
    token_ids: IntArray  # [R, S]; S = 1 + the longest draft; -1 past ``num_sampled``
    num_sampled: IntArray  # [R] tokens that the row keeps: the accepted draft tokens and one more
    # Row index (into the plan's entries) -> one TokenLogprobs per sampled token.
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    # Entry -> one per computed prompt token: the logprob of the *next* prompt token at that position.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    # [R, num_made] new drafts, -1 where there is none; None: no entry needs them
    drafts: IntArray | None = None
    # Entry -> why a token is missing after its ``num_sampled`` tokens. That sequence ends, the others
    # continue.
    errors: dict[int, str] = field(default_factory=dict)
    # Entries of ``errors`` with finite logits: the request's own constraints forbade every token.
    forbidden: frozenset[int] = frozenset()
    seconds: float = 0.0  # device time of the step; 0: not measured
    experts: ExpertIds | None = None  # of the plan's tokens; None: ``EngineLimits.routed_experts`` is None
    loads_done: tuple[int, ...] = ()  # ids of loads from host memory that have ended, each reported once


class GrammarService(Protocol):
    """Compiles grammars while steps run. The executor computes the masks of rows."""

    def prepare(self, sampling: SamplingSpec, context: Sequence[int]) -> Future[str | None]:
        """Compile ``sampling.grammar``. ``context``: prompt tokens that already belong to the output.

        The result is None, or the reason why the request cannot be served. Never raises.
        """
        ...

    def check(self, grammar: str) -> Future[str | None]:
        """Compile a grammar without a request and test it. The result is None, or the reason why it cannot be
        used."""
        ...

    def close(self) -> None:
        """End the service's threads."""
        ...


# Waits for a step that was handed to the device. Raises ``EngineError`` if the step failed.
FetchResult = Callable[[], StepResult]


class Executor(Protocol):
    """Owns the device. ``execute`` returns as soon as the work is enqueued, so that the next plan can be made
    meanwhile. Results are collected in the order of execution.
    """

    def execute(self, plan: StepPlan) -> FetchResult: ...

    def use_idle_time(self) -> bool:
        """Prepare one thing before it is needed. Returns False if nothing is left to prepare.

        Called between steps while there are no requests. Raises ``EngineError``.
        """
        ...

    def shutdown(self) -> None: ...
