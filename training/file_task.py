"""Held-out questions of the evaluation as lines for ``chorale eval file:PATH``: sums, calls and JSON.

``python -m training.file_task --out questions.jsonl`` writes the first of the cases that
``training.evaluate`` asks, so that the scores of a served model compare with its table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chorale.harmony.messages import Message, ToolDescription
from training.corpus import Family, arithmetic, sample, structured, tools
from training.corpus.base import Dialogue
from training.evaluate import FIRST_SEED

FAMILIES: dict[str, Family] = {
    "sum": arithmetic.sums,
    "call": tools.one_call,
    "json": structured.json_answer,
}


def lines(count: int) -> Iterator[dict[str, Any]]:
    """Returns equal numbers of each family; calls are made by the model, none are replayed by the client."""
    for position, (name, family) in enumerate(FAMILIES.items()):
        wanted = count // len(FAMILIES) + (position < count % len(FAMILIES))
        seed = FIRST_SEED
        while wanted:
            dialogue = sample(seed, "eval", family)
            seed += 1
            if name == "call" and not dialogue.answer["calls"]:
                continue
            wanted -= 1
            yield line(f"{name}-{seed - 1 - FIRST_SEED}", name, dialogue)


def line(name: str, group: str, dialogue: Dialogue) -> dict[str, Any]:
    request: dict[str, Any] = {"reasoning_effort": dialogue.effort}
    if dialogue.functions:
        request["tools"] = [_tool(one) for one in dialogue.functions]
    for one in dialogue.formats:
        form = {"name": one.name, "schema": one.schema, "description": one.description}
        form = {key: value for key, value in form.items() if value is not None}
        request["response_format"] = {"type": "json_schema", "json_schema": form}
    messages = [_message(one) for one in dialogue.history]
    if dialogue.instructions is not None:
        messages.insert(0, {"role": "developer", "content": dialogue.instructions})
    answer, grader = _graded(dialogue.answer)
    return {
        "id": name, "group": group, "prompt": _joined(messages), "request": request, "answer": answer,
        "grader": grader,
    }  # fmt: skip


def _graded(answer: dict[str, Any]) -> tuple[Any, Any]:
    if "result" in answer:
        return answer["result"], "number"
    if "json" in answer:
        return answer["schema"], {"type": "json_schema", "equals": answer["json"], "strict": True}
    calls = [{"name": name, "arguments": values} for name, values in answer["calls"]]
    return {"type": "array"}, {"type": "json_schema", "equals": calls, "strict": True}


def _tool(tool: ToolDescription) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _message(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": "call_0", "content": message.content}
    if message.recipient is None:
        return {"role": message.role, "content": message.content}
    name = message.recipient.removeprefix("functions.")
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": message.content}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Numbers the calls, so that each result names its call."""
    calls = 0
    for message in messages:
        if "tool_calls" in message:
            calls += 1
            message["tool_calls"][0]["id"] = f"call_{calls}"
        elif message["role"] == "tool":
            message["tool_call_id"] = f"call_{calls}"
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with given.out.open("w", encoding="utf-8") as file:
        for one in lines(given.lines):
            file.write(json.dumps(one, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
