"""ServerState: what every endpoint is handed. Built once when the app is created; nothing is ambient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chorale.api.background import Background
from chorale.client.base import EngineClient
from chorale.config import ServerConfig
from chorale.grammar.checker import GrammarChecker

if TYPE_CHECKING:
    from chorale.api.operator.metrics import Metrics
    from chorale.harmony.vocab import Vocabulary
    from chorale.store.store import ResponseStore
    from chorale.tools.contract import ToolService


@dataclass(slots=True)
class Lifecycle:
    """The server's own life, beside the engine's. Written by ``server``, read by /ready and /load."""

    draining: bool = False  # SIGTERM came: running requests finish, a balancer should go elsewhere
    num_requests: int = 0  # requests whose answer is not complete, those over a WebSocket included
    num_sockets: int = 0  # open WebSocket connections


@dataclass(frozen=True, slots=True)
class ServerState:
    client: EngineClient
    config: ServerConfig
    vocab: Vocabulary
    metrics: Metrics
    store: ResponseStore
    model_names: tuple[str, ...]  # every name this server answers to; the first is echoed in bodies
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    background: Background = field(default_factory=Background)  # responses without a connection
    tools: ToolService | None = None  # what this server runs for the model; None: nothing
