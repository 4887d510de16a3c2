"""Model names: which ones this server answers to."""

from __future__ import annotations

from chorale.api.state import ServerState
from chorale.errors import ModelNotFoundError


def check_model(state: ServerState, model: str | None) -> None:
    """None means the one model that is served. Raises ``ModelNotFoundError``."""
    if model is not None and model not in state.model_names:
        raise ModelNotFoundError(
            f"the model '{model[:128]}' does not exist; this server has: {', '.join(state.model_names)}",
            param="model",
        )
