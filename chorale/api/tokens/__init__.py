"""vLLM's endpoints for tokens in, tokens out.

/inference/v1/generate takes what the render endpoints return.
"""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from chorale.api.state import ServerState
from chorale.api.tokens.endpoint import Running, abort, generate


def routes(state: ServerState) -> list[Route]:
    running = Running()
    return [
        Route("/inference/v1/generate", partial(generate, state, running), methods=["POST"]),
        Route("/inference/v1/abort_requests", partial(abort, state, running), methods=["POST"]),
    ]
