"""Weight transfer under vLLM's paths, between /pause and /resume; ``admin`` guards it.

An update changes all weights of all engines, or none: if one of its calls fails, it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.http.responses import json_response, read_json
from chorale.api.state import ServerState
from chorale.engine.commands import TRANSFER_IS_OFF, UPDATES, Command
from chorale.errors import ChoraleError, ConflictError, NotFoundError, invalid

_LONGEST_VERSION = 256  # characters


async def init_weight_transfer_engine(state: ServerState, request: Request) -> Response:
    """Connects the engines with the sender of weights, as far as the back end needs it."""
    info = await _object(state, request, "init_info")
    return await _step(state, Command(action="init_weight_transfer_engine", info=info), "initialized")


async def shutdown_weight_transfer_engine(state: ServerState, request: Request) -> Response:
    return await _step(state, Command(action="shutdown_weight_transfer_engine"), "shut down")


async def start_weight_update(state: ServerState, request: Request) -> Response:
    """Begins an update. A body is ignored: clients of older versions of vLLM send one."""
    return await _step(state, Command(action="start_weight_update"), "started")


async def update_weights(state: ServerState, request: Request) -> Response:
    """Returns once the tensors that the body announces have arrived."""
    info = await _object(state, request, "update_info")
    return await _step(state, Command(action="update_weights", info=info), "received")


async def finish_weight_update(state: ServerState, request: Request) -> Response:
    """Lets all engines use the new weights, once each has confirmed that its update is complete."""
    version = ""
    if (await request.body()).strip():
        given = (await read_json(request, state.config)).get("weight_version")
        version = "" if given is None else _version_of("weight_version", given)
    await _step(state, Command(action="prepare_weight_update"), "complete")
    # All engines are to agree also if the client of this request is gone.
    finish = Command(action="finish_weight_update", version=version)
    return await asyncio.shield(asyncio.ensure_future(_step(state, finish, "finished")))


async def update_weight_version(state: ServerState, request: Request) -> Response:
    """Labels the weights, which stay the same."""
    version = _version_of("new_version", (await read_json(request, state.config)).get("new_version"))
    await state.client.control(Command(action="update_weight_version", version=version))
    return json_response({"success": True, "new_version": version})


async def weight_info(state: ServerState, request: Request) -> Response:
    """Returns the label of the weights. An engine that was restarted has those of its start."""
    version = (await state.client.control(Command(action="state"))).weight_version
    if not version:
        raise ConflictError("the engines have weights of different versions; update all of them")
    return json_response({"weight_version": version})


async def _step(state: ServerState, command: Command, done: str) -> Response:
    """Executes a command in all engines. If one fails within an update, all give the update up."""
    if not state.client.info.weight_transfer:
        raise NotFoundError(TRANSFER_IS_OFF)
    try:
        await state.client.control(command)
    except ConflictError:
        if command.action in UPDATES[1:]:
            with contextlib.suppress(ChoraleError):
                await state.client.control(Command(action="abandon_weight_update"))
        raise
    return json_response({"message": f"Weight transfer: {done}"})


async def _object(state: ServerState, request: Request, name: str) -> dict[str, Any]:
    found = (await read_json(request, state.config)).get(name)
    if not isinstance(found, dict):
        raise invalid(name, "must be an object")
    return found


def _version_of(name: str, version: object) -> str:
    if not isinstance(version, str) or not 0 < len(version) <= _LONGEST_VERSION:
        raise invalid(name, f"must be a string of 1 to {_LONGEST_VERSION} characters")
    return version
