"""Completions: raw prompts (text or token ids) to raw text, without harmony parsing."""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from chorale.api.completions.endpoint import create
from chorale.api.state import ServerState

__all__ = ["create", "routes"]


def routes(state: ServerState) -> list[Route]:
    return [Route("/v1/completions", partial(create, state), methods=["POST"])]
