"""The multi-turn categories: in each turn the model calls functions of stateful APIs until it is satisfied.

The model's calls are then repeated on new instances, turn by turn, next to the expected ones. After each
turn the states must be equal, and the results so far must include those of the turn's expected calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chorale.evaluation.task import Message, Outcome, Reply, Session
from chorale.evaluation.tasks.bfcl.api_process import ApiFault, ApiProcess, open_apis
from chorale.evaluation.tasks.bfcl.calls import as_python, read_calls
from chorale.evaluation.tasks.bfcl.entries import Entry
from chorale.evaluation.tasks.bfcl.fault import Fault
from chorale.evaluation.tasks.bfcl.schema import to_tools
from chorale.evaluation.tasks.bfcl.source import BfclFiles

# The leaderboard's (bfcl_eval 2026.3.23, Apache-2.0).
MAX_STEPS = 20  # of a turn; the conversation ends in the step that exceeds it
MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"

_SHOWN = 2000  # characters of a result in the report
Steps = list[list[str]]  # the calls of each step, as Python source


@dataclass(slots=True)
class Played:
    """The conversation: the calls of each turn's steps and, for the report, their results."""

    turns: list[Steps] = field(default_factory=list)
    results: list[list[list[str]]] = field(default_factory=list)


async def run(files: BfclFiles, entry: Entry, session: Session) -> Outcome:
    async with open_apis(files, entry) as apis:
        played = Played()
        try:
            await _play(entry, session, apis, played)
            fault = await check_turns(apis, played.turns, entry.answer)
        except _ModelFault as stopped:
            fault = Fault("multi_turn:api_fault", f"A call of the model broke the API classes: {stopped}")
    answer = "\n".join("; ".join(call for step in turn for call in step) for turn in played.turns)
    detail: dict[str, Any] = {"reason": "right" if fault is None else fault.message, "turns": _shown(played)}
    if fault is not None:
        detail |= {"kind": fault.kind, **fault.detail}
    return Outcome(float(fault is None), answer if answer.strip() else None, detail)


def _shown(played: Played) -> list[Any]:
    return [
        [
            {"calls": calls, "results": [text[:_SHOWN] for text in texts]}
            for calls, texts in zip(steps, results, strict=True)
        ]
        for steps, results in zip(played.turns, played.results, strict=True)
    ]


class _ModelFault(Exception):
    """The classes failed on a call of the model: it never returned, or needed too much memory."""


# ---------------------------------------------------------------------- the conversation


async def _play(entry: Entry, session: Session, apis: ApiProcess, played: Played) -> None:
    messages: list[Message] = []
    functions = list(entry.shown)
    for number, turn in enumerate(entry.turns):
        if number in entry.added:
            functions += entry.added[number]
            turn = [{"role": "user", "content": MORE_FUNCTIONS}]
        messages += turn
        if not await _play_turn(messages, to_tools(functions), session, apis, played):
            return


async def _play_turn(
    messages: list[Message],
    tools: list[dict[str, Any]],
    session: Session,
    apis: ApiProcess,
    played: Played,
) -> bool:
    """Asks until the model calls nothing. Returns False if it makes too many steps."""
    steps: Steps = []
    results: list[list[str]] = []
    played.turns.append(steps)
    played.results.append(results)
    while len(steps) <= MAX_STEPS:
        reply = await session.ask(messages, tools=tools or None)
        messages.append(reply.message)
        calls = read_calls(reply)
        if calls is None:
            messages += _unread(reply)
            return True
        steps.append([as_python(call) for call in calls])
        results.append([])  # of equal length, should the calls fail
        results[-1] = await _called(apis, "model", steps[-1])
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": result}
            for call, result in zip(reply.tool_calls, results[-1], strict=True)
        ]
    return False


def _unread(reply: Reply) -> list[Message]:
    """Answers calls whose arguments are not JSON, which end the turn: servers refuse unanswered calls."""
    return [
        {"role": "tool", "tool_call_id": call.id, "content": "Error: the arguments are not a JSON object."}
        for call in reply.tool_calls
    ]


async def _called(apis: ApiProcess, side: str, calls: Sequence[str]) -> list[str]:
    try:
        return await apis.call(side, calls)
    except ApiFault as fault:
        raise _ModelFault(str(fault)) from None


# ---------------------------------------------------------------------- the verdict


async def check_turns(
    apis: ApiProcess, turns: Sequence[Steps], expected: Sequence[Sequence[str]]
) -> Fault | None:
    """Returns the reason why the calls are wrong, None if they are right.

    ``expected``: the calls of each turn; a turn without any is not checked.
    """
    if len(turns) != len(expected):
        message = f"More than {MAX_STEPS} steps in turn {len(turns) - 1}."
        return Fault("multi_turn:force_terminated", message)
    results: list[str] = []
    for number, (steps, calls) in enumerate(zip(turns, expected, strict=True)):
        for step in steps:
            results += await _called(apis, "model_eval", step)
        right = await apis.call("truth_eval", calls)
        fault = await _check_turn(apis, number, steps, results, right) if calls else None
        if fault is not None:
            return fault
    return None


async def _check_turn(
    apis: ApiProcess, number: int, steps: Steps, results: Sequence[str], expected: Sequence[str]
) -> Fault | None:
    if not any(steps):
        return Fault("multi_turn:empty_turn_model_response", f"No call in turn {number}.")
    state = await apis.compare("model_eval", "truth_eval")
    if state:
        message = f"After turn {number}, the state of {state['class']} is not the expected one."
        return Fault("multi_turn:instance_state_mismatch", message, state)
    missing = _missing(expected, results)
    if missing:
        message = f"Until turn {number}, results of expected calls are missing."
        shown = [text[:_SHOWN] for text in missing]
        return Fault("multi_turn:execution_response_mismatch", message, {"missing": shown})
    return None


def _missing(expected: Sequence[str], results: Sequence[str]) -> list[str]:
    """Returns the expected results that are not among the results, each counted as often as it occurs."""
    left = list(results)
    missing = []
    for text in expected:
        if text in left:
            left.remove(text)
        else:
            missing.append(text)
    return missing
