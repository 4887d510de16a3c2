"""Prints the reasoning, then the answer, as they arrive: python examples/streaming_chat.py ["your question"]

Needs ``chorale serve`` in another terminal, and ``pip install openai``.
"""

from __future__ import annotations

import sys

from common import KEY, URL, model_name
from openai import OpenAI


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "What is 17 + 25?"
    client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
    print("Reasoning: ", end="", flush=True)
    stream = client.chat.completions.create(
        model=model_name(),
        messages=[{"role": "user", "content": question}],
        stream=True,
        stream_options={"include_usage": True},
    )
    answering = False
    for chunk in stream:
        if chunk.usage:
            print(f"\n[{chunk.usage.completion_tokens} tokens]")
        for choice in chunk.choices:
            # The SDK also has attributes for fields that are not in OpenAI's API, like "reasoning".
            print(getattr(choice.delta, "reasoning", None) or "", end="", flush=True)
            if choice.delta.content and not answering:
                answering = True
                print("\n\nAnswer: ", end="")
            print(choice.delta.content or "", end="", flush=True)


if __name__ == "__main__":
    main()
