"""Function calls whose pieces arrive in a stream: python examples/streamed_function_calls.py

Needs ``chorale serve`` in another terminal, and ``pip install openai``.
"""

from __future__ import annotations

import json
from typing import Any

from common import KEY, URL, model_name
from openai import OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather for a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "City name"}},
                "required": ["city"],
            },
        },
    }
]


def get_weather(city: str) -> dict[str, Any]:
    return {"city": city, "temperature": 18, "condition": "cloudy"}


def stream_message(client: OpenAI, model: str, messages: list[Any]) -> dict[str, Any]:
    """Prints the answer as it arrives. Returns the assistant's message with its calls."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": ""}
    calls: dict[int, dict[str, Any]] = {}
    stream = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, temperature=0, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            print(choice.delta.content or "", end="", flush=True)
            for piece in choice.delta.tool_calls or []:
                call = calls.setdefault(piece.index, {"type": "function", "function": {"arguments": ""}})
                if piece.id:  # only the first piece of a call has its id and name
                    call["id"] = piece.id
                if piece.function and piece.function.name:
                    call["function"]["name"] = piece.function.name
                if piece.function and piece.function.arguments:
                    call["function"]["arguments"] += piece.function.arguments
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def main() -> None:
    client, model = OpenAI(base_url=f"{URL}/v1", api_key=KEY), model_name()
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    for _ in range(5):  # limits the number of rounds
        message = stream_message(client, model, messages)
        messages.append(message)  # with the reasoning, which the model continues after a call
        for call in message.get("tool_calls", []):
            function = call["function"]
            result = get_weather(**json.loads(function["arguments"]))
            print(f"{function['name']}({function['arguments']}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})
        if "tool_calls" not in message:
            print()
            return


if __name__ == "__main__":
    main()
