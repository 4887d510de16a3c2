"""A conversation that the server stores; a request sends only what is new: python examples/conversation.py

Needs ``chorale serve`` in another terminal, and ``pip install openai``.
"""

from __future__ import annotations

from common import KEY, URL, model_name
from openai import OpenAI


def main() -> None:
    client, model = OpenAI(base_url=f"{URL}/v1", api_key=KEY), model_name()
    conversation = client.conversations.create(metadata={"topic": "sums"})
    for question in ("What is 17 + 25?", "What is 812 - 345?"):
        response = client.responses.create(
            model=model, conversation=conversation.id, input=question, temperature=0
        )
        print(f"{question} {response.output_text}")

    for item in client.conversations.items.list(conversation.id, order="asc"):
        if item.type == "message":
            print(f"{item.role}: {''.join(getattr(part, 'text', '') for part in item.content)}")
    client.conversations.delete(conversation.id)


if __name__ == "__main__":
    main()
