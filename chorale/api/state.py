"""ServerState: what every endpoint is handed. Built once when the app is created; nothing is ambient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chorale.client.base import EngineClient
from chorale.config import ServerConfig

if TYPE_CHECKING:
    from chorale.api.metrics import Metrics
    from chorale.api.responses.store import ResponseStore
    from chorale.harmony.vocab import Vocabulary


@dataclass(frozen=True, slots=True)
class ServerState:
    client: EngineClient
    config: ServerConfig
    vocab: Vocabulary
    metrics: Metrics
    store: ResponseStore
    model_names: tuple[str, ...]  # every name this server answers to; the first is echoed in bodies
