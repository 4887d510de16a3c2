"""The response object and its items as JSON objects, shared by the body, the events and the stored row."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from chorale.api.logprobs import LogprobsWriter
from chorale.api.reasoning_tokens import write_reasoning
from chorale.api.responses.items.built_in import built_in_object
from chorale.api.responses.items.client_calls import call_object
from chorale.api.responses.items.encrypted_content import compaction_object
from chorale.api.responses.prepared import Prepared
from chorale.api.responses.request import ResponsesRequest
from chorale.api.usage import NO_METRICS, ShownMetrics, metrics_object
from chorale.errors import ChoraleError, EngineError, QueueFullError, RequestError
from chorale.harmony.vocab import Vocabulary
from chorale.requests.formats import DEFAULT_NAME
from chorale.store.protocol import RENDERING, TOOL_STATE, Item, StoredItem, StoredResponse
from chorale.tools.contract import UrlCitation
from chorale.turns.events import (
    BUILTIN_ITEMS,
    CLIENT_CALLS,
    Fold,
    FoldedItem,
    ItemClosed,
    ItemOpened,
    TurnEnded,
    Usage,
)

TEXTS = CLIENT_CALLS | {"compaction"}  # kinds without content parts
Status = str  # "in_progress" and the item statuses of chorale.turns.events


def base_object(request: ResponsesRequest, prepared: Prepared, model: str, created: float) -> dict[str, Any]:
    """Returns a response object with all keys, as it is when the turn begins."""
    sampling = prepared.turn.sampling
    return {
        "id": prepared.turn.request_id,
        "object": "response",
        "created_at": int(created),
        "completed_at": None,
        "status": "in_progress",
        "background": request.background,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "conversation": {"id": request.conversation.id} if request.conversation else None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": request.effort or prepared.prompt.effort,
            "summary": request.reasoning.summary_asked,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store,
        "temperature": sampling.temperature,
        "text": {"format": _format(request), "verbosity": request.text.verbosity or "medium"},
        "tool_choice": prepared.prompt.tools.echo_choice,
        "tools": prepared.prompt.tools.echo,
        "top_logprobs": request.top_logprobs,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "truncation": request.truncation,
        "usage": None,
        "user": request.user,
        "metadata": request.metadata,
    }


def _format(request: ResponsesRequest) -> dict[str, Any]:
    """Returns the text format in OpenAI's flat form, with all keys."""
    given = request.text.format or {}
    if given.get("type") != "json_schema":
        return {"type": given.get("type", "text")}
    nested = given.get("json_schema")
    flat = {key: value for key, value in given.items() if key != "json_schema"}
    asked = {**flat, **nested} if isinstance(nested, dict) else flat
    schema = {"name": DEFAULT_NAME, "description": None, **asked}
    return {**schema, "strict": bool(schema.get("strict"))}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "tool_output_tokens": usage.tool_output_tokens,  # vLLM's
        },
        "total_tokens": usage.total_tokens,
    }


def error_object(error: ChoraleError) -> dict[str, Any]:
    """Returns a response's ``error``. Its ``code`` is from OpenAI's fixed list, which SDKs check."""
    code = "server_error"
    if isinstance(error, QueueFullError):
        code = "rate_limit_exceeded"
    elif isinstance(error, RequestError):
        code = "invalid_prompt"
    return {"code": code, "message": error.message}


# --------------------------------------------------------------------------- items


def output_text(
    text: str, logprobs: list[dict[str, Any]], citations: Iterable[UrlCitation] = ()
) -> dict[str, Any]:
    annotations = [annotation(citation) for citation in citations]
    return {"type": "output_text", "annotations": annotations, "logprobs": logprobs, "text": text}


def annotation(citation: UrlCitation) -> dict[str, Any]:
    return {
        "type": "url_citation",
        "start_index": citation.start_index,
        "end_index": citation.end_index,
        "url": citation.url,
        "title": citation.title,
    }


def reasoning_text(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def item_object(opened: ItemOpened, status: Status, body: Any) -> Item:
    """Returns an item. ``body``: a list of content parts, or the text of a call or compaction."""
    if opened.kind == "message":
        return {
            "id": opened.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": body,
            "phase": opened.phase,
        }
    if opened.kind == "reasoning":
        return {"id": opened.item_id, "type": "reasoning", "summary": [], "content": body, "status": status}
    if opened.kind in CLIENT_CALLS:
        return call_object(opened, status, body)
    if opened.kind == "compaction":
        return compaction_object(opened.item_id, body)
    raise ValueError(f"unknown kind of item: {opened.kind}")


def is_void(item: FoldedItem) -> bool:
    """Returns whether an item is an incomplete approval request or summary, which clients cannot use."""
    return item.kind in ("mcp_approval_request", "compaction") and item.status != "completed"


def close_items(fold: Fold) -> list[Any]:
    """Returns the events that close the open items of a turn as incomplete."""
    return [ItemClosed(i, "incomplete") for i, item in enumerate(fold.items) if item.status is None]


def rendering(request: ResponsesRequest) -> dict[str, Any]:
    """Returns what a ``ResponseBuilder`` needs besides the response object, as it is stored."""
    return {
        "logprobs": request.num_logprobs is not None,
        "hide_reasoning": not request.include_reasoning,
        "include": list(request.include),
    }


class ResponseBuilder:
    """Folds the events of a response, and builds all of its objects. ``rendering``: of its request."""

    def __init__(
        self,
        base: dict[str, Any],
        rendering: Mapping[str, Any],
        vocab: Vocabulary,
        metrics: ShownMetrics = NO_METRICS,
    ) -> None:
        self.base = base
        self._metrics = metrics
        self.fold = Fold()
        self._rendering = rendering
        self._logprobs = LogprobsWriter(vocab) if rendering.get("logprobs") else None
        self._include: Collection[str] = rendering.get("include") or ()

    @staticmethod
    def of_stored(stored: StoredResponse, vocab: Vocabulary) -> ResponseBuilder:
        """Returns a builder for the events of a stored background response, which starts as ``queued``."""
        begun = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
        base = {**stored.to_object(), **begun, "status": "queued", "output": []}
        return ResponseBuilder(base, stored.body.get(RENDERING) or {}, vocab)

    @property
    def wants_logprobs(self) -> bool:
        return self._logprobs is not None

    def shows(self, opened: ItemOpened) -> bool:
        return opened.kind != "reasoning" or not self._rendering.get("hide_reasoning")

    def logprobs(self, entries: Any) -> list[dict[str, Any]]:
        if self._logprobs is None:
            return []
        content: list[dict[str, Any]] = self._logprobs.chat(entries, self.base["top_logprobs"])["content"]
        return content

    def part(self, item: FoldedItem) -> dict[str, Any]:
        """Returns the content part of a finished message or reasoning item."""
        if item.kind == "reasoning":
            return reasoning_text(item.text)
        return output_text(item.text, self.logprobs(item.logprobs), item.citations)

    def item(self, item: FoldedItem) -> Item:
        """Returns a finished item."""
        if item.kind in BUILTIN_ITEMS:
            return self.built_in(item, item.status or "incomplete")
        body = item.text if item.kind in TEXTS else [self.part(item)]
        made = item_object(item.opened, item.status or "incomplete", body)
        if item.kind == "reasoning" and "reasoning.encrypted_content" in self._include:
            made["encrypted_content"] = write_reasoning(item.content_token_ids)
        return made

    def built_in(self, item: FoldedItem, status: Status) -> Item:
        """Returns an item of a built-in tool in its current state."""
        return built_in_object(item, status, self._include)

    def output(self) -> list[StoredItem]:
        """Returns the finished items with their exact tokens, unless a stop string truncated the text."""
        items = self.fold.items
        ended = self.fold.ended
        cut = items[-1] if items and ended is not None and isinstance(ended.stop_reason, str) else None
        return [
            StoredItem(self.item(item), () if item is cut else item.token_ids)
            for item in items
            if self.shows(item.opened) and not is_void(item)
        ]

    def finish(self, output: list[StoredItem]) -> dict[str, Any]:
        """Returns the response object after ``TurnEnded``, for the body and the terminal event."""
        ended = self.fold.ended
        assert ended is not None
        status, error = _status(ended), end_error(ended)
        return {
            **self.base,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error_object(error) if error is not None else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [stored.item for stored in output],
            "usage": usage_object(ended.usage),
            **({"metrics": metrics_object(ended, self._metrics)} if self._metrics.any else {}),
        }

    def stored(
        self,
        body: dict[str, Any],
        inputs: tuple[StoredItem, ...],
        output: list[StoredItem],
        owner: bytes,
        created: float,
    ) -> StoredResponse:
        ended = self.fold.ended
        kept = {**body, "output": []}
        if ended is not None and ended.tool_state is not None:
            kept[TOOL_STATE] = ended.tool_state
        if self.base.get("background"):
            kept[RENDERING] = self._rendering
        return StoredResponse(
            id=body["id"],
            owner=owner,
            previous_id=body["previous_response_id"],
            created=created,
            status=body["status"],
            body=kept,
            input=inputs,
            output=tuple(output),
        )


def _status(ended: TurnEnded) -> str:
    if ended.reason == "length":
        return "incomplete"
    return "completed" if ended.reason in ("stop", "tool_calls") else "failed"


def end_error(ended: TurnEnded) -> ChoraleError | None:
    """Returns the error of a failed response. An abort that the client did not request is a failure."""
    if ended.reason not in ("abort", "error"):
        return None
    return ended.error or EngineError("the response was aborted by the server", code="response_aborted")
