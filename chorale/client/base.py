"""The interface between text code and the engine, which works with tokens.

``EngineClient`` has two implementations in the product, ``remote`` (the engine in its own process, over an
ipc socket) and ``fleet`` (several of those), and two for tests: token streams written by hand
and an engine in a thread (both in ``tests/support``). The server cannot tell them apart.
``LLM`` has no client: it steps the ``EngineCore`` itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from chorale.config.sampling_fields import MAX_LOGPROBS
from chorale.engine.commands import Command, Outcome
from chorale.engine.types import NOBODY, EngineStats, GenerateRequest, Owner, TokenChunk


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the engine, sent to its clients once it is ready."""

    model: str  # folder or hub id of the loaded model
    revision: str | None = None
    fingerprint: str = ""  # hash of all that changes answers, without the number of ranks
    model_hash: str = ""  # of config.json and a sample of each tensor
    batch_invariant: bool = False
    engine_id: str = ""  # new at every start of the engine process
    pid: int = 0  # id of the engine process; 0: the engine runs in this process
    max_model_len: int
    max_num_seqs: int
    vocab_size: int = 201088
    eos_token_ids: tuple[int, ...] = (200002, 199999, 200012)
    num_kv_tokens: int = 0  # capacity of the KV pool, in tokens of full-attention context
    block_size: int = 16
    num_blocks: int = 0
    num_host_pages: int = 0  # KV pages that fit in host memory
    host_kv_bytes: int = 0  # size of these pages, summed over all ranks
    device: str = "cpu"
    tensor_parallel_size: int = 1  # number of ranks, each with one device
    exchange: str = ""  # how ranks sum partial results: "peers" (Chorale's kernels), "nccl", "rccl", ...
    rank_free_bytes: tuple[int, ...] = ()  # free memory of each rank's device before weights were loaded
    rank_bytes: dict[str, tuple[int, ...]] = {}  # "weights" and "kv_cache": bytes on each rank
    rank_links: str = ""  # links between the ranks' GPUs, for example "NVLink (NV18)"; "": unknown
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"  # type of keys and values in the KV cache
    ops: str = "reference"
    parameters: int = 0
    enable_prefix_caching: bool = True
    speculation: str = ""  # description of how tokens are drafted; "": no speculative decoding
    num_speculative_tokens: int = 0  # maximum of draft tokens per row and step
    synthetic_acceptance: bool = False  # drafts are accepted by a profile: the output has no meaning
    enable_sleep_mode: bool = False
    max_loras: int = 0  # adapters that may run at once; 0: adapters are off
    has_profiler: bool = False
    weight_transfer: str = ""  # the back end of weight transfer; "": it is off
    logprobs_mode: str = "raw_logprobs"  # what log-probabilities are: those of the model, or after filters
    max_logprobs: int = MAX_LOGPROBS  # maximum of alternative tokens per position in a request
    # Layers and experts per token of ``TokenChunk.routed_experts``; None: the engine does not keep them.
    routed_experts: tuple[int, int] | None = None
    # generation_config.json: sampling defaults by vLLM's names (temperature, top_p, ...)
    default_sampling: dict[str, float] = {}
    notes: tuple[str, ...] = ()  # warnings about degraded features, one line each
    startup_seconds: dict[str, float] = {}  # phase -> seconds, for the start-up table


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """``loading`` reports progress, ``dead`` lasts from a crash to the restart, ``failed`` is permanent."""

    state: Literal["loading", "ready", "draining", "dead", "failed"]
    phase: str = ""  # "download", "load", "kv_pool", "warm_up", ...
    progress: float | None = None  # 0..1 within the phase
    message: str = ""
    restarts: int = 0  # restarts of the engine process that were begun, also those that failed


# The place of an engine that has left a fleet; another engine may take it.
LEFT = EngineStatus("failed", message="the engine has left")


class TokenStream(Protocol):
    """The chunks of all choices of one request, until every choice has finished.

    Each item is a list of the chunks that have arrived since the last read, so a slow reader gets fewer,
    longer lists. Raises ``EngineDeadError`` if the engine dies. ``aclose`` before the end aborts the request.
    """

    @property
    def engine(self) -> int:
        """Index of the engine that serves the request; final once the first item or an error was read."""
        ...

    def __aiter__(self) -> AsyncIterator[list[TokenChunk]]: ...

    async def __anext__(self) -> list[TokenChunk]: ...

    async def aclose(self) -> None: ...

    def read_directly(self, read: Callable[[TokenChunk], bool]) -> None:
        """Call ``read`` with chunks but the last while the consumer waits; on False, the consumer gets it."""
        ...

    def drop(self, index: int) -> None:
        """Stop choice ``index``; the others continue. Idempotent."""
        ...


class EngineView(Protocol):
    """The public state of one engine."""

    @property
    def info(self) -> EngineInfo:
        """Raises ``EngineLoadingError`` until the engine has been ready once."""
        ...

    @property
    def status(self) -> EngineStatus: ...

    @property
    def stats(self) -> EngineStats: ...


class EngineClient(EngineView, Protocol):
    """One engine, or several replicas, whose ``info``, ``status`` and ``stats`` are then combined."""

    @property
    def engines(self) -> Sequence[EngineView]:
        """Each engine, in the order of its index."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Number of this client's choices that have been accepted and have not finished."""
        ...

    def reserve(self, num_choices: Mapping[str, int], owner: Owner = NOBODY) -> None:
        """Admit several requests (request id to ``n``): either all of them or none.

        ``submit`` uses the reservation of its request; ``release`` cancels unused reservations.
        Raises the same errors as ``submit``.
        """
        ...

    def release(self, request_ids: Iterable[str]) -> None:
        """Cancel the reservations of these requests that ``submit`` has not used. Idempotent."""
        ...

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Send a request to the engine, and return its stream at once.

        Raises ``EngineLoadingError`` / ``EngineDeadError`` when no engine is ready, ``QueueFullError`` when
        running and queued choices have reached their limit, and ``RequestError`` for more choices than
        this limit.
        """
        ...

    async def check_grammar(self, grammar: str) -> str | None:
        """Return the reason why the engine cannot use a grammar made by ``grammar.frames``, or None.

        Raises ``EngineLoadingError`` / ``EngineDeadError`` when no engine is ready.
        """
        ...

    async def control(self, command: Command) -> Outcome:
        """Execute an administrative command on every engine that has not failed for good.

        Raises ``ConflictError`` if the state or the configuration does not allow it, ``EngineLoadingError`` /
        ``EngineDeadError`` if an engine is missing or dies meanwhile. Then some may have executed it, and it
        may be sent again. The successor of an engine that dies is paused or sleeps like the one that died.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        ...

    async def close(self) -> None: ...
