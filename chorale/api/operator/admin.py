"""Administrative endpoints under vLLM's paths: pause, sleep, reset, profile, and the configuration. Those of
weight transfer are in ``weights``.

They stop the service for everyone, so they require an API key. On a server without keys, they answer 404
unless it listens for this machine only, or the operator turns them on (``--admin-endpoints``).
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import os
import platform
import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chorale.api.http.responses import json_response, read_json
from chorale.api.state import Handler, ServerState
from chorale.client.base import EngineInfo
from chorale.config.engine import ServerConfig
from chorale.engine.commands import MEMORY, PROFILER_IS_OFF, Command
from chorale.errors import NotFoundError, invalid, unsupported
from chorale.machine import facts

_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_PACKAGES = ("torch", "triton", "numpy", "msgspec", "starlette", "uvicorn", "transformers")


def why_off(config: ServerConfig, *, has_keys: bool) -> str:
    """Returns why the endpoints are off, or ""."""
    if config.admin_endpoints == "off":
        return "administrative endpoints are off (--admin-endpoints off)"
    if config.admin_endpoints == "on" or has_keys or config.uds is not None or _is_loopback(config.host):
        return ""
    return (
        "administrative endpoints are off on a server without API keys that other machines can reach; start "
        "it with --api-key, or with --admin-endpoints on"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def guarded(handler: Handler) -> Handler:
    """Returns an endpoint that raises ``NotFoundError`` while the administrative endpoints are off."""

    async def if_on(state: ServerState, request: Request) -> Response:
        if off := why_off(state.config, has_keys=state.has_keys):
            raise NotFoundError(off)
        return await handler(state, request)

    return if_on


# ---------------------------------------------------------------------------- pause and sleep


async def pause(state: ServerState, request: Request) -> Response:
    """Returns once no request runs. Until /resume, new requests wait (keep) or get 503 (wait, abort)."""
    mode = _choice(request, "mode", ("abort", "wait", "keep"))
    clear_cache = _boolean(request, "clear_cache", default=True)
    await state.client.control(Command(action="pause", mode=mode, clear_cache=clear_cache))
    return json_response({"status": "paused"})


async def resume(state: ServerState, request: Request) -> Response:
    await state.client.control(Command(action="resume"))
    return json_response({"status": "resumed"})


async def is_paused(state: ServerState, request: Request) -> Response:
    outcome = await state.client.control(Command(action="state"))
    return json_response({"is_paused": outcome.is_paused})


async def sleep(state: ServerState, request: Request) -> Response:
    """Returns once the memory is released. New requests wait until the engine is awake."""
    level = int(_choice(request, "level", ("1", "0", "2")))
    mode = _choice(request, "mode", ("abort", "wait", "keep"))
    await state.client.control(Command(action="sleep", mode=mode, level=level))
    return json_response({"status": "sleeping", "level": level})


async def wake_up(state: ServerState, request: Request) -> Response:
    tags = request.query_params.getlist("tags")
    for tag in tags:
        if tag not in (*MEMORY, "scheduling"):
            raise invalid("query.tags", f"must be {', '.join(MEMORY)} or scheduling")
    outcome = await state.client.control(Command(action="wake_up", tags=tuple(tags)))
    return json_response({"status": "sleeping" if outcome.is_sleeping else "awake", "tags": tags or None})


async def is_sleeping(state: ServerState, request: Request) -> Response:
    outcome = await state.client.control(Command(action="state"))
    return json_response({"is_sleeping": outcome.is_sleeping})


# ---------------------------------------------------------------------------- cache and profiler


async def reset_prefix_cache(state: ServerState, request: Request) -> Response:
    """Also empties the KV pages in host memory, with or without ``reset_external``."""
    _boolean(request, "reset_external", default=False)
    preempt = _boolean(request, "reset_running_requests", default=False)
    outcome = await state.client.control(Command(action="reset_prefix_cache", preempt=preempt))
    return json_response({"success": outcome.success})


async def start_profile(state: ServerState, request: Request) -> Response:
    """Traces are written where the operator said. Overrides in the body are refused."""
    _require_profiler(state)
    if (await request.body()).strip():
        for name, value in (await read_json(request, state.config)).items():
            if value is not None:
                raise unsupported(name, "is not supported; see --profiler-config")
    await state.client.control(Command(action="start_profile"))
    return Response()


async def stop_profile(state: ServerState, request: Request) -> Response:
    """Returns once the traces are written."""
    _require_profiler(state)
    await state.client.control(Command(action="stop_profile"))
    return Response()


def _require_profiler(state: ServerState) -> None:
    if not state.client.info.has_profiler:
        raise NotFoundError(PROFILER_IS_OFF)


# ---------------------------------------------------------------------------- configuration


async def get_world_size(state: ServerState, request: Request) -> Response:
    """Returns the number of ranks of all replicas, or of one."""
    ranks = state.client.info.tensor_parallel_size
    if _boolean(request, "include_dp", default=True):
        ranks *= state.config.data_parallel_size
    return json_response({"world_size": ranks})


async def server_info(state: ServerState, request: Request) -> Response:
    """Returns the configuration under vLLM's names, without secrets."""
    form = _choice(request, "config_format", ("text", "json"))
    sections = _sections(state.config, state.client.info, state.model_names)
    text = ", ".join(f"{name}={value!r}" for name, value in sections.items())
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("VLLM_", "CHORALE_")) and not _SECRET.search(name) and "@" not in value
    }
    config = text if form == "text" else sections
    system = await asyncio.to_thread(_system)
    return json_response({"vllm_config": config, "vllm_env": variables, "system_env": system})


def _sections(config: ServerConfig, info: EngineInfo, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns vLLM's sections, with every fact about the engine in ``model_config``."""
    model = {"dtype": f"torch.{info.dtype}", "served_model_name": list(names)}
    ranks = info.tensor_parallel_size
    return {
        "model_config": msgspec.to_builtins(info) | model,
        "cache_config": {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,
            "cache_dtype": info.kv_cache_dtype,
            "enable_prefix_caching": info.enable_prefix_caching,
        },
        "parallel_config": {
            "tensor_parallel_size": ranks,
            "pipeline_parallel_size": 1,
            "data_parallel_size": config.data_parallel_size,
            "world_size": ranks,
        },
        "scheduler_config": {"max_num_seqs": info.max_num_seqs},
        "speculative_config": {"method": info.speculation} if info.speculation else None,
        "lora_config": None,
        "weight_transfer_config": {"backend": info.weight_transfer} if info.weight_transfer else None,
    }


@functools.cache
def _system() -> dict[str, Any]:
    versions = {f"{name}_version": facts.version_of(name) for name in _PACKAGES}
    return {"os": platform.platform(), "python_version": platform.python_version(), **versions}


# ---------------------------------------------------------------------------- query parameters


def _choice(request: Request, name: str, choices: tuple[str, ...]) -> Any:
    """Returns a query parameter; by default the first of its ``choices``."""
    value = request.query_params.get(name, choices[0])
    if value not in choices:
        raise invalid(f"query.{name}", f"must be one of {', '.join(choices)}")
    return value


def _boolean(request: Request, name: str, *, default: bool) -> bool:
    found = _BOOLEANS.get(request.query_params.get(name, str(default)).lower())
    if found is None:
        raise invalid(f"query.{name}", "must be true or false")
    return found
