"""Runs batch lines: each line is a request to the server's own endpoints, called in this process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chorale.api.chat import endpoint as chat
from chorale.api.completions import endpoint as completions
from chorale.api.http.auth import OWNER, authenticate_routes, request_id
from chorale.api.http.responses import error_response
from chorale.api.responses import endpoint as responses
from chorale.api.state import Lifecycle, ServerState
from chorale.api.telemetry.metered_client import MeteredClient
from chorale.client.admission import capacity
from chorale.errors import ChoraleError
from chorale.jobs.execute import AppSender
from chorale.jobs.line import ENDPOINTS
from chorale.jobs.runner import BatchRunner, Engine
from chorale.store.batch_rows import Result
from chorale.tracing import ignored
from chorale.tracing.context import CURRENT, IgnoredFields, RequestContext

logger = logging.getLogger(__name__)


class LineApp:
    """The endpoints that lines may call, as an ASGI app.

    Errors become error responses, as in the server. Only internal errors are logged.
    """

    def __init__(self, state: ServerState) -> None:
        assert isinstance(state.client, MeteredClient)
        self._warns = state.config.unknown_fields == "warn"
        inner = replace(state, client=state.client.of_batches(), lifecycle=Lifecycle())
        handlers = (chat.create, completions.create, responses.create)
        routes = [
            Route(path, partial(handler, inner), methods=["POST"])
            for path, handler in zip(ENDPOINTS, handlers, strict=True)
        ]
        self._app: ASGIApp = Router(authenticate_routes(routes, ()), redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        collected = IgnoredFields() if self._warns else None
        context = RequestContext(request_id(scope), ignored=collected)
        CURRENT.set(context)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start" and (names := ignored.header(context)):
                header = (ignored.HEADER.encode(), names.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, named)
        except ChoraleError as error:
            await error_response(error)(scope, receive, named)
        except Exception:
            logger.exception("a line of a batch failed")
            await error_response(ChoraleError("internal error"))(scope, receive, send)


def make_runner(state: ServerState) -> BatchRunner:
    """Returns the batch runner of this process, whose server keeps files."""
    app, service = LineApp(state), state.batches
    assert service is not None

    def is_ready() -> bool:
        return state.client.status.state == "ready"

    def concurrency() -> int:
        if state.lifecycle.draining or not is_ready():
            return 0
        rows = state.client.info.max_num_seqs
        # Lines count towards the server's admission limit, so leave most of it to other requests.
        admitted = capacity(state.config, rows)
        most = min(state.config.batch_max_concurrency or rows, admitted // 4)
        return max(1, most // state.config.api_server_count)

    def counted(results: Sequence[Result]) -> None:
        num_completed = sum(result.completed for result in results)
        state.metrics.lines_answered(num_completed, len(results) - num_completed)

    return BatchRunner(
        state.store,
        service.contents,
        state.leases.server_id,
        Engine(state.model_names[0], is_ready, concurrency),
        state.config,
        woken=service.woken,
        sender=lambda owner: AppSender(app, scope={OWNER: owner}),
        counted=counted,
    )
