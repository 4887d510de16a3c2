"""Resumer: resumes background responses of other servers.

The request is parsed and prepared like a new one. The id, input items, conversation and response object are
kept, because the client has seen them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from dataclasses import replace

from chorale.api.http.auth import CALLER
from chorale.api.responses.background.job import Job
from chorale.api.responses.prepare import prepare
from chorale.api.responses.request import ResponsesRequest, parse_request
from chorale.api.responses.run import Run
from chorale.api.state import ServerState, select_model
from chorale.errors import ChoraleError, EngineError, QueueFullError
from chorale.store.protocol import Claimed, StoreError

logger = logging.getLogger(__name__)


def _unpacked(request: bytes) -> ResponsesRequest:
    return parse_request(json.loads(zlib.decompress(request)))


class Resumer:
    """Implements ``background.Resumer`` for one server."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def find(self) -> list[str]:
        """Returns the ids of waiting responses that this server can resume now."""
        state = self._state
        if state.client.status.state != "ready" or state.lifecycle.draining:
            return []
        model = state.model_names[0]
        waiting = await state.store.background.waiting()
        return [response_id for response_id, named in waiting if named == model or named in state.adapters]

    @property
    def room(self) -> int:
        return self._state.background_room

    async def take(self, response_id: str, server_id: str) -> Job | None:
        """Claims a response and prepares its job. Returns None if it is gone or cannot be resumed."""
        rows = self._state.store.background
        claimed = await rows.claim(response_id, server_id)
        if claimed is None:
            return None
        try:
            return Job(await self._run(claimed), resumed=True)
        except (EngineError, QueueFullError, StoreError) as error:
            logger.warning("background response %s is still waiting: %s", response_id, error)
            await rows.put_back(server_id, response_id)
        except ChoraleError as error:
            logger.warning("background response %s cannot be resumed: %s", response_id, error)
            await rows.fail(server_id, {response_id})
        except BaseException:  # this server is stopping
            await rows.put_back(server_id, response_id)
            raise
        return None

    async def _run(self, claimed: Claimed) -> Run:
        state, stored = self._state, claimed.response
        CALLER.set(stored.owner)  # the job's task inherits it
        fields = await asyncio.to_thread(_unpacked, claimed.request)
        state = select_model(state, fields.model)
        prepared = await prepare(state, fields, stored.owner)
        prepared = replace(
            prepared,
            turn=replace(prepared.turn, request_id=stored.id),
            prompt=replace(prepared.prompt, input=stored.input),
        )
        logger.info("resuming background response %s", stored.id)
        return Run(state, fields, prepared, stored.owner, claimed.lease, begun=stored)
