"""vLLM's endpoints for tokens in, tokens out.

/inference/v1/generate takes what the render endpoints return; the derender endpoints take what it returns.
"""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from chorale.api.state import ServerState
from chorale.api.tokens.derender import derender_chat, derender_completion
from chorale.api.tokens.endpoint import Running, abort, generate


def routes(state: ServerState) -> list[Route]:
    running: Running = {}
    return [
        Route("/inference/v1/generate", partial(generate, state, running), methods=["POST"]),
        Route("/inference/v1/abort_requests", partial(abort, state, running), methods=["POST"]),
        Route("/v1/chat/completions/derender", partial(derender_chat, state), methods=["POST"]),
        Route("/v1/completions/derender", partial(derender_completion, state), methods=["POST"]),
    ]
