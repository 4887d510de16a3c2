"""Runs a call to a built-in tool, and renders its result as a message for the model.

A failure of a tool becomes the text of its result; it never fails the turn.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from chorale.harmony.messages import tool_result
from chorale.harmony.render import render_message
from chorale.harmony.vocab import Vocabulary
from chorale.tools.contract import Progress, ToolCall, ToolIdentity, ToolResult, failed_result
from chorale.tracing.context import within
from chorale.turns.built_in.open import TurnTools
from chorale.turns.needs import CallTool

logger = logging.getLogger(__name__)

MIN_RESULT_TOKENS = 64  # with less room for a result, the turn ends
ANSWER_TOKENS = 1024  # tokens kept free after a result (at most a quarter of the window)
_CUT_NOTE = "\n[cut here: the rest does not fit into the context window]"


async def run_call(tools: TurnTools, need: CallTool) -> AsyncGenerator[Progress | ToolResult]:
    """Yields progress, then one ``ToolResult``."""
    if need.identity is None:
        assert need.refusal is not None
        yield need.refusal
        return
    result: ToolResult | None = None
    with within(f"execute_tool {need.identity.name}", _attributes(need.identity, need.call)) as span:
        try:
            async with aclosing(tools.box.call(need.call)) as news:
                async for entry in news:
                    if isinstance(entry, ToolResult):
                        result = entry
                        break
                    yield entry
        except Exception:  # a bug in a tool: the model sees an error, the operator has the log
            logger.exception("the tool %s failed", need.call.recipient)
        if result is None:
            error = "The tool failed and gave no result."
            result = failed_result(need.identity, need.call, f"Error: {error}", error)
        if span is not None and result.failed:
            span.fail("tool_error")
    if tools.on_called is not None:
        tools.on_called(need.identity.kind, result.failed)
    yield result


def _attributes(identity: ToolIdentity, call: ToolCall) -> dict[str, str]:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": identity.name,
        "gen_ai.tool.type": "extension",  # run by the server
        "gen_ai.tool.call.id": call.call_id,
        "chorale.tool.kind": identity.kind,
        "chorale.tool.server_label": identity.server_label,
    }


def room_for_result(need: CallTool, max_model_len: int) -> int:
    """Returns the maximum number of tokens of a result's message."""
    return max_model_len - len(need.prompt_token_ids) - min(ANSWER_TOKENS, max_model_len // 4)


def render_result(need: CallTool, result: ToolResult, vocab: Vocabulary, room: int) -> list[int] | None:
    """Returns the message of a result, cut to ``room`` tokens, or None if there is too little room."""
    message = tool_result(result.author, result.content, need.channel)
    token_ids = render_message(message, vocab)
    if len(token_ids) <= room:
        return token_ids
    if room < MIN_RESULT_TOKENS:
        return None
    overhead = len(render_message(replace(message, content=_CUT_NOTE), vocab)) + 4
    kept = vocab.decode(vocab.encode(result.content)[: room - overhead]).removesuffix("\ufffd")
    return render_message(replace(message, content=kept + _CUT_NOTE), vocab)
