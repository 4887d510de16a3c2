"""An agent with a tool, built with OpenAI's Agents SDK: python examples/agents/openai_agents.py

Needs ``chorale serve`` in another terminal, and ``pip install openai-agents``.
"""

from __future__ import annotations

import os

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, OpenAI

URL = os.environ.get("CHORALE_URL", "http://localhost:8000")
KEY = os.environ.get("CHORALE_API_KEY", "unused")


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather for a city."""
    return f'{{"city": "{city}", "temperature": 18, "condition": "cloudy"}}'


def main() -> None:
    set_tracing_disabled(True)  # otherwise the SDK sends traces to OpenAI
    models = OpenAI(base_url=f"{URL}/v1", api_key=KEY).models.list()
    model = os.environ.get("CHORALE_MODEL", models.data[0].id)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
    agent = Agent(
        name="weather",
        model=OpenAIResponsesModel(model=model, openai_client=client),
        model_settings=ModelSettings(temperature=0),
        tools=[get_weather],
    )
    print(Runner.run_sync(agent, "What is the weather in Paris?").final_output)


if __name__ == "__main__":
    main()
