"""POST /invocations, the only path that SageMaker calls. The fields of the body select the endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.chat.endpoint import create as create_chat
from chorale.api.completions.endpoint import create as create_completion
from chorale.api.http.responses import read_json
from chorale.api.responses.endpoint import create as create_response
from chorale.api.state import ServerState
from chorale.errors import RequestError

_ENDPOINTS: dict[str, Callable[[ServerState, Request], Awaitable[Response]]] = {
    "messages": create_chat,
    "prompt": create_completion,
    "input": create_response,
}


async def invoke(state: ServerState, request: Request) -> Response:
    """Serves a chat for ``messages``, a completion for ``prompt``, a response for ``input``."""
    body = await read_json(request, state.config)
    named = [key for key in _ENDPOINTS if key in body]
    if len(named) != 1:
        raise RequestError("the body must have messages (chat), prompt (completions) or input (responses)")
    return await _ENDPOINTS[named[0]](state, request)  # the request caches its body
