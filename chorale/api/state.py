"""ServerState: the dependencies of all endpoints, built once and passed explicitly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.adapters import AdapterRegistry
from chorale.api.usage import ShownMetrics
from chorale.client.base import EngineClient
from chorale.client.shares import Shares
from chorale.config.engine import ServerConfig, owner_name
from chorale.engine.types import BASE, NOBODY, AdapterRef, Owner
from chorale.errors import ModelNotFoundError
from chorale.grammar.checker import GrammarChecker
from chorale.jobs.background import Background
from chorale.jobs.leases import Leases
from chorale.jobs.service import BatchService
from chorale.tools.pdf.reader import PdfReader
from chorale.tracing.context import recording
from chorale.turns.built_in.open import ToolHost
from chorale.version import __version__

if TYPE_CHECKING:
    from chorale.api.telemetry.metrics import Metrics
    from chorale.harmony.vocab import Vocabulary
    from chorale.store.store import ResponseStore
    from chorale.tools.contract import ToolService
    from chorale.tracing.otel import Tracer


@dataclass(slots=True)
class Lifecycle:
    """The HTTP server's state. Set by the server and its middleware, read by /ready and /load."""

    draining: bool = False  # after SIGTERM: running requests finish, new ones should go to another server
    num_requests: int = 0  # requests in progress, including those over a WebSocket
    sockets: Shares = field(default_factory=Shares)  # open WebSocket connections
    # Running requests of /inference/v1/generate: id in the engine -> digest of the key, id of the answer.
    generations: dict[str, tuple[bytes, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerState:
    client: EngineClient
    config: ServerConfig
    vocab: Vocabulary
    metrics: Metrics
    store: ResponseStore
    model_names: tuple[str, ...]  # all served model names; responses carry the first
    background: Background  # background responses of this process
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    grammars: GrammarChecker = field(init=False)
    pdfs: PdfReader = field(default_factory=PdfReader)
    tools: ToolService | None = None  # the built-in tools, or None if the server has none
    tracer: Tracer | None = None  # None: no traces
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)
    adapter: AdapterRef = BASE  # of the requests that have this state
    batches: BatchService | None = None  # None: the server keeps no files
    has_keys: bool = False  # requests need an API key

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "grammars", GrammarChecker(lambda grammar: self.client.check_grammar(grammar))
        )

    @property
    def tool_host(self) -> ToolHost:
        return ToolHost(self.tools, self.grammars, self.metrics.tool_called)

    @property
    def fingerprint(self) -> str | None:
        """Returns ``system_fingerprint``, or None if answers have none. Raises ``EngineLoadingError``."""
        mode = self.config.fingerprint_mode
        if mode in ("custom", "none"):
            return self.config.fingerprint_value
        info, engines = self.client.info, self.config.data_parallel_size
        sizes = {"tp": info.tensor_parallel_size, "dp": engines} if mode == "full" else {}
        several = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        return "-".join(filter(None, ["chorale", __version__, *several, info.fingerprint]))

    def shown_metrics(self, *, asked: bool = False) -> ShownMetrics:
        """``asked``: the request asks for the times. Raises ``EngineLoadingError``."""
        drafts = self.client.info.num_speculative_tokens
        return ShownMetrics(self.config.request_metrics or asked, self.config.spec_decode_metrics, drafts)

    def owner(self, digest: bytes) -> Owner:
        """Returns the owner of a request. ``digest``: the API key's digest, b"" without keys."""
        if not digest:
            return NOBODY
        name = owner_name(digest)
        return Owner(name, self.config.key_weights.get(name, 1.0))

    @property
    def leases(self) -> Leases:
        return self.background.leases

    @property
    def background_room(self) -> int:
        """Returns this process's share of the limit on running background responses."""
        return max(1, self.config.max_background_responses // self.config.api_server_count)


Handler = Callable[[ServerState, Request], Awaitable[Response]]


def check_model(state: ServerState, model: str | None) -> None:
    """Checks a model name; None selects the served model. Raises ``ModelNotFoundError``."""
    if (traced := recording()) is not None and model is not None:
        traced.record.model = model[:128]
    if model is not None and model not in state.model_names and model not in state.adapters:
        shown = (*state.model_names, *(each.ref.name for each in state.adapters.all[:20]))
        raise ModelNotFoundError(
            f"the model '{model[:128]}' does not exist; available: {', '.join(shown)}", param="model"
        )


def select_model(state: ServerState, model: str | None) -> ServerState:
    """Returns the state for requests to a model: the server's, or that of an adapter. Raises as
    ``check_model``."""
    check_model(state, model)
    served = None if model in state.model_names else state.adapters.find(model)
    if served is None:
        return state
    adapted = replace(state, adapter=served.ref, model_names=(served.ref.name, *state.model_names))
    object.__setattr__(adapted, "grammars", state.grammars)  # its cache is shared
    return adapted
