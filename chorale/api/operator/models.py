"""/v1/models and /v1/models/{id}, with an entry for each served model name."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorale.api.http.responses import json_response
from chorale.api.state import ServerState, check_model


def routes(state: ServerState) -> list[Route]:
    created = int(time.time())  # constant for all requests, unlike in vLLM
    return [
        Route("/v1/models", partial(list_models, state, created)),
        Route("/v1/models/{model:path}", partial(retrieve_model, state, created)),
    ]


async def list_models(state: ServerState, created: int, request: Request) -> Response:
    """Lists the models. Returns 503 ``engine_loading`` until the engine has reported the context length."""
    return json_response(
        {
            "object": "list",
            "data": [
                describe(state, name, created)
                for name in (*state.model_names, *(each.ref.name for each in state.adapters.all))
            ],
        }
    )


async def retrieve_model(state: ServerState, created: int, request: Request) -> Response:
    name = request.path_params["model"]
    check_model(state, name)
    return json_response(describe(state, name, created))


def describe(state: ServerState, name: str, created: int) -> dict[str, Any]:
    """Returns vLLM's model card: OpenAI's fields, the context length, and the model's folder or hub id; of an
    adapter, its folder and the model under it."""
    info, adapter = state.client.info, state.adapters.find(name)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "chorale",
        "root": info.model if adapter is None else adapter.ref.path,
        "parent": None if adapter is None else adapter.base or state.model_names[0],
        "max_model_len": info.max_model_len,
        "permission": [_permission(name, created)],
    }


def _permission(name: str, created: int) -> dict[str, Any]:
    return {
        "id": f"modelperm-{name}", "object": "model_permission", "created": created,
        "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True,
        "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False,
        "organization": "*", "group": None, "is_blocking": False,
    }  # fmt: skip
