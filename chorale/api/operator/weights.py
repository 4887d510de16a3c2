"""Weight transfer under vLLM's paths: new weights reach the engines while they are paused.

    POST /pause ── /start_weight_update ── /update_weights ... ── /finish_weight_update ── /resume

An update changes all weights of all engines, or none. If a call fails, the update has ended, and the old
weights stay; so does /resume before the end. The guard of these endpoints is that of ``admin``.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.http.responses import json_response, read_json
from chorale.api.state import ServerState
from chorale.client.base import EngineInfo
from chorale.engine.commands import TRANSFER_IS_OFF, Command
from chorale.errors import ChoraleError, ConflictError, NotFoundError, invalid

_LONGEST_VERSION = 256  # characters


async def init_weight_transfer_engine(state: ServerState, request: Request) -> Response:
    """Connects the engines with the sender of weights, as far as the back end needs it."""
    _require_transfer(state.client.info)
    info = await _object(state, request, "init_info")
    await state.client.control(Command(action="init_weight_transfer_engine", info=info))
    return json_response({"message": "Weight transfer initialized"})


async def shutdown_weight_transfer_engine(state: ServerState, request: Request) -> Response:
    _require_transfer(state.client.info)
    await state.client.control(Command(action="shutdown_weight_transfer_engine"))
    return json_response({"message": "Weight transfer shut down"})


async def start_weight_update(state: ServerState, request: Request) -> Response:
    """Begins an update. A body is ignored: clients of older versions of vLLM send one."""
    _require_transfer(state.client.info)
    await _or_abandon(state, Command(action="start_weight_update"))
    return json_response({"message": "Weight update started"})


async def update_weights(state: ServerState, request: Request) -> Response:
    """Returns once the tensors that the body announces have arrived."""
    _require_transfer(state.client.info)
    info = await _object(state, request, "update_info")
    await _or_abandon(state, Command(action="update_weights", info=info))
    return json_response({"message": "Weights updated"})


async def finish_weight_update(state: ServerState, request: Request) -> Response:
    """Lets all engines use the new weights, once each has confirmed that its update is complete."""
    _require_transfer(state.client.info)
    version = ""
    if (await request.body()).strip():
        given = (await read_json(request, state.config)).get("weight_version")
        version = "" if given is None else _version_of("weight_version", given)
    await _or_abandon(state, Command(action="prepare_weight_update"))
    # All engines are to agree also if the client of this request is gone.
    finish = state.client.control(Command(action="finish_weight_update", version=version))
    await asyncio.shield(asyncio.ensure_future(finish))
    return json_response({"message": "Weight update finished"})


async def update_weight_version(state: ServerState, request: Request) -> Response:
    """Labels the weights, which stay the same."""
    version = _version_of("new_version", (await read_json(request, state.config)).get("new_version"))
    await state.client.control(Command(action="update_weight_version", version=version))
    return json_response({"success": True, "new_version": version})


async def weight_info(state: ServerState, request: Request) -> Response:
    """Returns the label of the weights. An engine that was restarted has those of its start again."""
    version = (await state.client.control(Command(action="state"))).weight_version
    if not version:
        raise ConflictError("the engines have weights of different versions; update all of them")
    return json_response({"weight_version": version})


POSTS = (
    init_weight_transfer_engine,
    shutdown_weight_transfer_engine,
    start_weight_update,
    update_weights,
    finish_weight_update,
    update_weight_version,
)
GETS = (weight_info,)


async def _or_abandon(state: ServerState, command: Command) -> None:
    """Executes a step of an update in all engines; if one fails, all give the update up."""
    try:
        await state.client.control(command)
    except ConflictError as error:
        if command.action != "start_weight_update":
            with contextlib.suppress(ChoraleError):
                await state.client.control(Command(action="abandon_weight_update"))
        raise error


def _require_transfer(info: EngineInfo) -> None:
    if not info.weight_transfer:
        raise NotFoundError(TRANSFER_IS_OFF)


async def _object(state: ServerState, request: Request, name: str) -> dict[str, Any]:
    found = (await read_json(request, state.config)).get(name)
    if not isinstance(found, dict):
        raise invalid(name, "must be an object")
    return found


def _version_of(name: str, version: object) -> str:
    if not isinstance(version, str) or not 0 < len(version) <= _LONGEST_VERSION:
        raise invalid(name, f"must be a string of 1 to {_LONGEST_VERSION} characters")
    return version
