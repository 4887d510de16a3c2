"""/v1/models and /v1/models/{id}, with an entry for each served model name."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.http.responses import json_response
from chorale.api.state import ServerState, check_model

_CREATED = int(time.time())  # constant for all requests, unlike in vLLM


async def list_models(state: ServerState, request: Request) -> Response:
    """Lists the models. Returns 503 ``engine_loading`` until the engine has reported the context length."""
    return json_response(
        {
            "object": "list",
            "data": [
                describe(state, name)
                for name in (*state.model_names, *(each.ref.name for each in state.adapters.all))
            ],
        }
    )


async def retrieve_model(state: ServerState, request: Request) -> Response:
    name = request.path_params["model"]
    check_model(state, name)
    return json_response(describe(state, name))


def describe(state: ServerState, name: str) -> dict[str, Any]:
    """Returns vLLM's model card: OpenAI's fields, the context length, and the model's folder or hub id; of an
    adapter, its folder and the model under it."""
    info, adapter = state.client.info, state.adapters.find(name)
    return {
        "id": name,
        "object": "model",
        "created": _CREATED,
        "owned_by": "chorale",
        "root": info.model if adapter is None else adapter.ref.path,
        "parent": None if adapter is None else adapter.base or state.model_names[0],
        "max_model_len": info.max_model_len,
        "permission": [_permission(name)],
    }


def _permission(name: str) -> dict[str, Any]:
    return {
        "id": f"modelperm-{name}", "object": "model_permission", "created": _CREATED,
        "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True,
        "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False,
        "organization": "*", "group": None, "is_blocking": False,
    }  # fmt: skip
