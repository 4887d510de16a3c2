"""One response from its prompt to its stored end, streamed or not. The only place that knows both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from chorale.api.logprobs import LogprobsWriter
from chorale.api.output import OutputEvent, TurnEnded, Usage
from chorale.api.responses.objects import ResponseBuilder, base_object, end_error
from chorale.api.responses.prepare import Prepared
from chorale.api.responses.request import ResponsesRequest
from chorale.api.responses.translate import Translator
from chorale.api.state import ServerState
from chorale.api.turn import run_turn
from chorale.errors import ChoraleError

logger = logging.getLogger("chorale.api.responses")


class Run:
    """Use ``stream`` or ``complete``, once."""

    def __init__(
        self, state: ServerState, request: ResponsesRequest, prepared: Prepared, owner: bytes
    ) -> None:
        self._state = state
        self._prepared = prepared
        self._owner = owner
        self._created = prepared.options.arrival_time
        with_logprobs = request.num_logprobs is not None
        self._builder = ResponseBuilder(
            base_object(request, prepared, state.model_names[0], self._created),
            LogprobsWriter(state.vocab) if with_logprobs else None,
            request.top_logprobs,
            hide_reasoning=not request.include_reasoning,
        )

    async def complete(self) -> dict[str, Any]:
        """The body. Raises the ``ChoraleError`` that the turn failed with: nothing was sent yet."""
        turn = self._turn()
        try:
            async for events in turn:
                self._builder.fold.add(events)
        finally:
            await turn.aclose()
        ended = self._builder.fold.ended
        if ended is not None and (error := end_error(ended)) is not None:
            raise error  # nobody knows this response's id: it is not stored
        return await self._conclude()

    async def stream(self) -> AsyncGenerator[bytes]:
        """SSE bytes, one piece a wake-up. Raises before the first piece only (full queue, no engine).

        The first piece goes out once the engine has the request, before it has a token.
        """
        translator = Translator(self._builder)
        turn = self._turn()
        first = asyncio.ensure_future(anext(turn))
        try:
            await asyncio.sleep(0)  # one step of the task: it submits, then waits for tokens
            if first.done() and first.exception() is not None:
                await first
            yield translator.start()
            async with aclosing(self._pieces(translator, turn, first)) as pieces:
                async for piece in pieces:
                    yield piece
            body = await self._conclude()
            yield translator.finish(body)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await turn.aclose()

    async def _pieces(
        self,
        translator: Translator,
        turn: AsyncGenerator[list[OutputEvent]],
        first: asyncio.Future[list[OutputEvent]],
    ) -> AsyncGenerator[bytes]:
        """The turn's events. An error before its first event arrives here, after ``response.created``."""
        try:
            events: list[OutputEvent] = await first
        except ChoraleError as early:
            self._builder.fold.add([_failed(early, len(self._prepared.prompt.token_ids))])
            yield translator.error(early)
            return
        data = translator.feed(events)
        if data:
            yield data
        async for events in turn:
            data = translator.feed(events)
            if data:
                yield data
        ended = self._builder.fold.ended
        if ended is not None and (error := end_error(ended)) is not None:
            yield translator.error(error)

    def _turn(self) -> AsyncGenerator[list[OutputEvent]]:
        return run_turn(
            self._state.client,
            self._state.vocab,
            prompt_token_ids=self._prepared.prompt.token_ids,
            sampling=self._prepared.sampling,
            options=self._prepared.options,
        )

    async def _conclude(self) -> dict[str, Any]:
        """The finished object, stored before anybody sees it: who has read it once can read it again.

        A store that fails does not fail the response: it is answered with ``store`` false, and counted.
        """
        builder = self._builder
        ended = builder.fold.ended
        if ended is not None and ended.repairs:
            self._state.metrics.repaired(ended.repairs)
        output = builder.output()
        body = builder.finish(output)
        if not body["store"]:
            return body
        record = builder.stored(body, self._prepared.prompt.input, output, self._owner, self._created)
        try:
            await self._state.store.put(record)
        except ChoraleError as error:
            self._state.metrics.series.count("chorale:response_store_failures")
            logger.warning("response %s could not be stored: %s", body["id"], error)
            builder.base["store"] = body["store"] = False
        return body


def _failed(error: ChoraleError, num_prompt_tokens: int) -> TurnEnded:
    return TurnEnded("error", Usage(input_tokens=num_prompt_tokens), error=error)
