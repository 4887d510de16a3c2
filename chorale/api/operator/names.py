"""The check of model names in requests."""

from __future__ import annotations

from chorale.api.state import ServerState
from chorale.errors import ModelNotFoundError


def check_model(state: ServerState, model: str | None) -> None:
    """Checks a model name; None selects the served model. Raises ``ModelNotFoundError``."""
    if model is not None and model not in state.model_names:
        raise ModelNotFoundError(
            f"the model '{model[:128]}' does not exist; available: {', '.join(state.model_names)}",
            param="model",
        )
