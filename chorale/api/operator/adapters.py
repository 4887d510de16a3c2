"""/v1/load_lora_adapter and /v1/unload_lora_adapter, if the operator allows them.

An adapter is read and checked on every engine before it is served. Running requests keep the weights with
which they began, also if an adapter is loaded again under the same name or unloaded.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from chorale.api.adapters import allowed_folder
from chorale.api.fields import parse
from chorale.api.http.responses import read_as
from chorale.api.state import ServerState
from chorale.config.adapters import is_name
from chorale.engine.commands import Command
from chorale.errors import ConflictError, NotFoundError, RequestError, invalid

OFF = "adapters cannot be loaded while serving; see --allow-runtime-lora-updating"


class LoadRequest(BaseModel):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False  # the file shows it


class UnloadRequest(BaseModel):
    lora_name: str
    lora_int_id: Any = None  # no effect, as in vLLM


async def load(state: ServerState, request: Request) -> Response:
    _check_on(state)
    asked = await read_as(request, state.config, partial(parse, LoadRequest))
    name, adapters = asked.lora_name, state.adapters
    if not is_name(name):
        raise invalid("lora_name", "must be a printable name of at most 256 characters")
    if name in state.model_names:
        raise invalid("lora_name", f"{name!r} is the name of the base model")
    if name in adapters and not asked.load_inplace:
        raise invalid("lora_name", f"{name!r} is loaded already; load_inplace replaces it")
    folder = await asyncio.to_thread(allowed_folder, asked.lora_path, state.config.lora_dirs)
    ref = adapters.new(name, str(folder))
    try:
        await state.client.control(Command(action="load_adapter", adapter=ref))
    except ConflictError as error:  # the engine's reason
        raise RequestError(error.message, param="lora_path", code="invalid_adapter") from error
    before = adapters.serve(ref)
    if before is not None:
        await state.client.control(Command(action="unload_adapter", adapter=before))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(state: ServerState, request: Request) -> Response:
    _check_on(state)
    asked = await read_as(request, state.config, partial(parse, UnloadRequest))
    ref = state.adapters.remove(asked.lora_name)
    await state.client.control(Command(action="unload_adapter", adapter=ref))
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def _check_on(state: ServerState) -> None:
    if not state.config.lora_updates or not state.config.enable_lora:
        raise NotFoundError(OFF)
