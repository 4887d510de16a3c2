"""Sequence: one choice of one request, from arrival to its last token.

A request with n > 1 becomes n sequences. One of them, the leader, computes the prompt; the others are
WAITING_FOR_PREFIX until it has, and then find the prompt's whole blocks in the prefix index.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from chorale.engine.accounts import Account
from chorale.engine.kv_cache.cache import BlockTables
from chorale.engine.kv_cache.hashing import extend_chain
from chorale.engine.kv_cache.host_loads import Load
from chorale.engine.types import AdapterRef, GenerateRequest, IntArray, SamplingSpec, TokenLogprobs

NO_TOKENS: IntArray = np.zeros(0, np.int32)


class Status(enum.IntEnum):
    WAITING_FOR_PREFIX = 0  # waits for a sibling to compute the shared prompt
    WAITING = 1  # in the queue, without row or blocks
    PREFILL = 2  # has a row; tokens are left to compute
    DECODE = 3  # has a row; one token at a time
    ENDED = 4
    LOADING = 5  # waits for pages of its prefix from host memory


@dataclass(slots=True, eq=False)
class RequestState:
    """The state shared by the choices of one request."""

    request: GenerateRequest
    prompt: IntArray
    root: bytes | None  # start of the block_hash chain; None: blocks are never shared
    arrival: float
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    is_scheduled: bool = False  # a choice was admitted once
    num_cached_tokens: int = 0  # at the first admission; later hits may be on the request's own blocks
    num_host_tokens: int = 0  # part of ``num_cached_tokens`` that came from host memory
    num_recomputed_tokens: int = 0  # cached but computed again; not in ``num_cached_tokens``
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt_done: bool = False  # a leader has computed the prompt
    leader: int = 0  # index of the choice that computes the prompt


class Sequence:
    """Tokens, status and row of one choice. ``RowTable`` holds how many of its tokens are computed."""

    __slots__ = (
        "account", "block_hashes", "blocks", "draft_steps", "drafts", "first_scheduled", "first_token",
        "has_loaded", "index", "is_batch", "key", "load", "max_len", "num_preemptions", "num_prompt",
        "output", "request", "request_id", "row", "sampling", "seed", "status", "stop_ids",
        "tokens_to_compute", "weight_version",
    )  # fmt: skip

    def __init__(
        self, request: RequestState, index: int, *, key: tuple[int, int], seed: int, max_len: int
    ) -> None:
        self.request = request
        self.request_id: str = request.request.request_id
        self.index = index
        self.is_batch = request.request.is_batch
        self.account = Account()  # replaced by the owner's account when the engine adds the request
        # (priority, arrival number): smaller runs first; keys of batch work are larger than all others.
        self.key = key
        self.sampling: SamplingSpec = request.request.sampling
        self.seed = seed
        self.max_len = max_len  # prompt and output together
        self.stop_ids: frozenset[int] = frozenset()
        self.num_prompt = int(request.prompt.shape[0])
        self.output: list[int] = []
        # Prompt and output at the last admission: the tokens that prefill computes.
        self.tokens_to_compute: IntArray = NO_TOKENS
        self.block_hashes: list[bytes] = []
        self.blocks = BlockTables()
        # Made by the device after the last step, if plans must contain them.
        self.drafts: IntArray = NO_TOKENS
        self.load: Load | None = None  # set from the load's start until the sequence is admitted
        self.has_loaded = False  # since it was added or preempted; it loads at most once
        self.row = -1
        self.status = Status.WAITING
        self.first_scheduled = 0.0
        self.first_token = 0.0
        self.num_preemptions = 0
        self.weight_version = ""  # of the newest token
        self.draft_steps = bytearray()  # see ``ChunkTimings.drafts``

    def __repr__(self) -> str:
        return f"<{self.request_id}/{self.index} {self.status.name} row {self.row} +{len(self.output)}>"

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + len(self.output)

    @property
    def cache_salt(self) -> str:
        return self.request.request.cache_salt

    @property
    def adapter(self) -> AdapterRef:
        return self.request.request.adapter

    @property
    def is_leader(self) -> bool:
        return self.index == self.request.leader

    @property
    def is_running(self) -> bool:
        return self.status is Status.PREFILL or self.status is Status.DECODE

    def all_tokens(self) -> IntArray:
        if not self.output:
            return self.request.prompt
        return np.concatenate([self.request.prompt, np.array(self.output, np.int32)])

    def extend_block_hashes(self, num_tokens: int, block_size: int) -> None:
        """Extend ``block_hashes`` to the whole blocks of the first ``num_tokens`` tokens, unless the blocks
        are never shared."""
        root, num_blocks = self.request.root, num_tokens // block_size
        if not self.block_hashes:  # siblings have the same prompt
            self.block_hashes = self.request.sequences[0].block_hashes[: self.num_prompt // block_size]
        start = len(self.block_hashes) * block_size
        if root is None or start >= num_blocks * block_size:
            return
        tokens = self.tokens_between(start, num_blocks * block_size)
        extend_chain(self.block_hashes, root, tokens.tobytes(), 4 * block_size)

    def tokens_between(self, start: int, stop: int) -> IntArray:
        """Return the tokens at these positions of prompt and output."""
        if stop <= len(self.tokens_to_compute):
            return self.tokens_to_compute[start:stop]
        if start >= self.num_prompt:
            return np.array(self.output[start - self.num_prompt : stop - self.num_prompt], np.int32)
        return self.all_tokens()[start:stop]
