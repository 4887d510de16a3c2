"""The interface between text code and the engine, which works with tokens.

``EngineClient`` has two implementations in the product, ``remote`` (the engine in its own process, over an
ipc socket) and ``fleet`` (several of those), and two for tests: token streams written by hand
(``chorale/testing``), and an engine in a thread (``tests/support``). The server cannot tell them apart.
``LLM`` has no client: it steps a ``Core`` itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from chorale.config.sampling_fields import MAX_LOGPROBS
from chorale.engine.types import NOBODY, EngineStats, GenerateRequest, Owner, TokenChunk


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the engine, sent to its clients once it is ready."""

    model: str  # folder or hub id that was loaded
    revision: str | None = None
    engine_id: str = ""  # new at every start of the engine process
    pid: int = 0  # of that process; 0: the engine runs in this one
    max_model_len: int
    max_num_seqs: int
    vocab_size: int = 201088
    eos_token_ids: tuple[int, ...] = (200002, 199999, 200012)
    num_kv_tokens: int = 0  # tokens of full-attention context that the pool holds
    block_size: int = 16
    num_blocks: int = 0
    num_host_pages: int = 0  # KV pages that host memory holds
    host_kv_bytes: int = 0  # their size, of all ranks
    device: str = "cpu"
    tensor_parallel_size: int = 1  # ranks, each with such a device
    exchange: str = ""  # how ranks add their parts: "peers" (Chorale's kernels), "nccl", "rccl", ...
    rank_free_bytes: tuple[int, ...] = ()  # of each rank's device, before it loaded
    rank_bytes: dict[str, tuple[int, ...]] = {}  # "weights" and "kv_cache" of each rank
    rank_links: str = ""  # between the ranks' GPUs: "NVLink (NV18)"; "": unknown
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"  # type of keys and values in the KV cache
    ops: str = "reference"
    parameters: int = 0
    enable_prefix_caching: bool = True
    speculation: str = ""  # how tokens are drafted, in words; "": not at all
    num_speculative_tokens: int = 0  # the most draft tokens of a row in a step
    synthetic_acceptance: bool = False  # drafts are accepted by a profile: the output has no meaning
    max_logprobs: int = MAX_LOGPROBS  # alternatives that a request may ask for
    # generation_config.json: sampling defaults by vLLM's names (temperature, top_p, ...)
    default_sampling: dict[str, float] = {}
    notes: tuple[str, ...] = ()  # one line each: whatever is degraded
    startup_seconds: dict[str, float] = {}  # phase -> seconds, for the start-up table


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """``loading`` has progress; ``dead``: between a crash and the restart; ``failed`` is permanent."""

    state: Literal["loading", "ready", "draining", "dead", "failed"]
    phase: str = ""  # "download", "load", "kv_pool", "warm_up", ...
    progress: float | None = None  # 0..1 within the phase
    message: str = ""


class Core(Protocol):
    """The engine interface that clients drive: ``engine.core.EngineCore``. All calls are on one thread."""

    @property
    def has_work(self) -> bool: ...

    def add_request(self, request: GenerateRequest) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def check_grammar(self, grammar: str) -> Future[str | None]: ...

    def step(self) -> list[TokenChunk]: ...

    def use_idle_time(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def shutdown(self) -> None: ...


class TokenStream(Protocol):
    """The chunks of one request, every choice of it, until each has finished.

    Each item is everything that has arrived since the last read (so a slow reader sees fewer, larger
    items). Raises ``EngineDeadError`` if the engine dies. Closing it early (``aclose``) aborts the request.
    """

    @property
    def engine(self) -> int:
        """Index of the engine that serves it; final once the first chunks, or an error, were read."""
        ...

    def __aiter__(self) -> AsyncIterator[list[TokenChunk]]: ...

    async def __anext__(self) -> list[TokenChunk]: ...

    async def aclose(self) -> None: ...

    def read_directly(self, read: Callable[[TokenChunk], bool]) -> None:
        """While the consumer waits, offer each chunk to ``read``; the consumer gets those that it refuses."""
        ...

    def drop(self, index: int) -> None:
        """Stop choice ``index``, which is not needed any more; the others continue. Idempotent."""
        ...


class EngineView(Protocol):
    """The public state of one engine."""

    @property
    def info(self) -> EngineInfo:
        """Raises ``EngineLoadingError`` until the engine was ready once."""
        ...

    @property
    def status(self) -> EngineStatus: ...

    @property
    def stats(self) -> EngineStats: ...


class EngineClient(EngineView, Protocol):
    """One engine, or several replicas: then ``info``, ``status`` and ``stats`` are those of all together."""

    @property
    def engines(self) -> Sequence[EngineView]:
        """Each engine, in the order of its index."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Choices accepted and not finished, of this client."""
        ...

    def reserve(self, num_choices: Mapping[str, int], owner: Owner = NOBODY) -> None:
        """Admit several requests together (request id to its ``n``): all of them, or none of them.

        ``submit`` takes the reserved place of its request; ``release`` gives back those that are left.
        Raises what ``submit`` does.
        """
        ...

    def release(self, request_ids: Iterable[str]) -> None:
        """Give back the places that ``reserve`` took and ``submit`` did not use. Idempotent."""
        ...

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Hand a request to the engine; returns at once.

        Raises ``EngineLoadingError`` / ``EngineDeadError`` when there is no engine, ``QueueFullError`` when
        running and queued choices have reached their limit, and ``RequestError`` for more choices than
        this limit.
        """
        ...

    async def check_grammar(self, grammar: str) -> str | None:
        """Return the reason why the engine cannot use a grammar (of ``grammar.frames``), or None.

        Raises ``EngineLoadingError`` / ``EngineDeadError`` when there is no engine.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        ...

    async def close(self) -> None: ...
