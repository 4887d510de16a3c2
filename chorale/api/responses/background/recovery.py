"""Recovery: ends a background response from its stored events, if its server cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from chorale.api.responses.event_log import join, pack, read_chunk
from chorale.api.responses.items.objects import ResponseBuilder, close_items
from chorale.harmony.vocab import Vocabulary
from chorale.store.protocol import RESTARTED, Recover, StoredItem, StoredResponse
from chorale.turns.events import OutputEvent

Ended = tuple[StoredResponse, bytes, int]


def recovery(vocab: Vocabulary) -> Recover:
    """Returns the ``Recover`` function for the store."""
    return partial(_recover, vocab)


def _recover(vocab: Vocabulary, response: StoredResponse, chunks: Sequence[bytes], status: str) -> Ended:
    """Implements ``Recover``. Open items become incomplete."""
    error = RESTARTED if status == "failed" else None
    body: dict[str, Any] = {**response.body, "status": status, "error": error}
    events = [event for chunk in chunks for event in read_chunk(chunk)]
    builder = ResponseBuilder.of_stored(response, vocab)
    builder.fold.add(event for event in events if isinstance(event, OutputEvent))
    closing = close_items(builder.fold)
    builder.fold.add(closing)
    output = builder.output()
    if output:  # drop the token ids, which may extend past a stop string
        output[-1] = StoredItem(output[-1].item)
    packed = [made for event in closing if (made := pack(event)) is not None]
    return replace(response, status=status, body=body, output=tuple(output)), join(packed), len(packed)
