"""A loop that runs the function calls of the model until it answers: python examples/function_calls.py

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
        "name": "get_weather",
        "description": "Get the current weather for a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City name"}},
            "required": ["city"],
        },
    }
]


def get_weather(city: str) -> dict[str, Any]:
    return {"city": city, "temperature": 18, "condition": "cloudy"}


def main() -> None:
    client, model = OpenAI(base_url=f"{URL}/v1", api_key=KEY), model_name()
    items: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    for _ in range(5):  # limits the number of rounds
        response = client.responses.create(model=model, input=items, tools=TOOLS, temperature=0)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            print(response.output_text)
            return
        items += response.output  # including the reasoning, which the model continues
        for call in calls:
            result = get_weather(**json.loads(call.arguments))
            print(f"{call.name}({call.arguments}) = {result}")
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(result)}
            )


if __name__ == "__main__":
    main()
